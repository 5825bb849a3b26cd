"""Pure functions from arrays to pictures: static figures for print, interactive ones for a page.

Nothing here knows a model, a run or a probe, and no number is computed that a probe would report. matplotlib is
imported when a figure is drawn, so that importing this package stays cheap.
"""

from .circuitsvis import attention_pattern as attention_pattern
from .circuitsvis import bundle_script as bundle_script
from .circuitsvis import colored_tokens as colored_tokens
from .heatmaps import kq_heatmaps as kq_heatmaps
from .heatmaps import ov_heatmap as ov_heatmap
from .heatmaps import symmetric_limit as symmetric_limit
from .svg import as_image as as_image
from .svg import as_svg as as_svg
from .trajectories import trajectories as trajectories
