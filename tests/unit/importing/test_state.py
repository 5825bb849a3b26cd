"""Files: what is read, what is refused, and that nothing in them is executed."""

import json
import os
import pickle
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import icl_mechinterp as icl
from icl_mechinterp.importing import WeightsError

TASK = icl.LinearRegression(d=3, context=6, noise=0.1)
MODEL = icl.attention_only(TASK, 2, seed=1)
STATE = icl.export_weights(MODEL, "fused", rows="labels")


class Payload:
    """Pickles into a call; loading it creates a file."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self):
        return os.mkdir, (str(self.file),)


def same(model) -> bool:
    return torch.equal(model.blocks[0].attn.W_K, MODEL.blocks[0].attn.W_K)


@pytest.mark.parametrize("suffix", [".pt", ".pth", ".bin", ".ckpt", ".PT"])
@pytest.mark.parametrize("wrapper", [None, "state_dict", "model_state_dict", "model"])
def test_torch_files_are_read(suffix: str, wrapper: str | None, tmp_path: Path) -> None:
    file = tmp_path / f"weights{suffix}"
    torch.save(STATE if wrapper is None else {wrapper: STATE, "epoch": 3, "optimizer": {"state": {}}}, file)
    assert same(icl.import_weights(file, TASK, scale=0.5))


def test_old_torch_files_are_read(tmp_path: Path) -> None:
    torch.save(STATE, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    assert same(icl.import_weights(tmp_path / "old.pt", TASK, scale=0.5))


def test_safetensors_and_state_dicts_are_read(tmp_path: Path) -> None:
    save_file(STATE, tmp_path / "weights.safetensors")
    assert same(icl.import_weights(tmp_path / "weights.safetensors", TASK, scale=0.5))
    assert same(icl.import_weights(str(tmp_path / "weights.safetensors"), TASK, scale=0.5))
    assert same(icl.import_weights({name: tensor.numpy() for name, tensor in STATE.items()}, TASK, scale=0.5))
    parameters = {name: torch.nn.Parameter(tensor) for name, tensor in STATE.items()}
    imported = icl.import_weights(parameters, TASK, scale=0.5)
    imported.blocks[0].attn.W_K.data.zero_()
    assert bool(parameters["k.weight"].any()), "the original shares nothing with the import"


@pytest.mark.parametrize("new_format", [True, False])
@pytest.mark.parametrize("inside", ["alone", "beside"])
def test_a_pickle_that_holds_code_executes_nothing(inside: str, new_format: bool, tmp_path: Path) -> None:
    made, file = tmp_path / "executed", tmp_path / "weights.pt"
    content = Payload(made) if inside == "alone" else {"state_dict": STATE, "hook": Payload(made)}
    torch.save(content, file, _use_new_zipfile_serialization=new_format)
    with pytest.raises(WeightsError) as caught:
        icl.import_weights(file, TASK, scale=0.5)
    assert not made.exists()
    message = str(caught.value)
    for part in (
        "refused",
        "can run any code",
        "mkdir",
        "only if you trust its author",
        "weights_only=False",
        "torch.save(",
    ):
        assert part in message
    with pytest.raises(WeightsError, match=r"refused"):  # the payload is real: an ordinary load runs it
        icl.import_weights(file, TASK, scale=0.5)
    torch.load(file, weights_only=False)
    assert made.exists()


def test_the_advice_in_a_refusal_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "module.pt"
    torch.save({"state_dict": STATE, "task": TASK}, file)
    with pytest.raises(WeightsError) as caught:
        icl.import_weights(file, TASK, scale=0.5)
    monkeypatch.chdir(tmp_path)
    exec("\n".join(line.strip() for line in str(caught.value).splitlines()[1:]), {})
    assert same(icl.import_weights(tmp_path / "weights.pt", TASK, scale=0.5))


def test_a_plain_pickle_under_a_torch_name_executes_nothing(tmp_path: Path) -> None:
    made = tmp_path / "executed"
    for name in ("weights.pt", "weights.safetensors"):
        (tmp_path / name).write_bytes(pickle.dumps(Payload(made)))
        with pytest.raises(WeightsError):
            icl.import_weights(tmp_path / name, TASK, scale=0.5)
    assert not made.exists()


def test_torn_files_are_told(tmp_path: Path) -> None:
    whole, torn = tmp_path / "whole.safetensors", tmp_path / "torn.safetensors"
    save_file(STATE, whole)
    content = whole.read_bytes()
    for length in (0, 7, 40, len(content) - 1):
        torn.write_bytes(content[:length])
        with pytest.raises(
            WeightsError, match=rf"torn\.safetensors \({length} bytes\) is not a whole safetensors file"
        ):
            icl.import_weights(torn, TASK, scale=0.5)
    torch.save(STATE, tmp_path / "whole.pt")
    content = (tmp_path / "whole.pt").read_bytes()
    for length in (0, 3, 100, len(content) // 2, len(content) - 30):
        (tmp_path / "torn.pt").write_bytes(content[:length])
        with pytest.raises(WeightsError, match=rf"torn\.pt \({length} bytes\) is not a file that torch.save wrote"):
            icl.import_weights(tmp_path / "torn.pt", TASK, scale=0.5)


def test_what_is_no_weights_file_is_told(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=r"does not exist.*Name a .safetensors"):
        icl.import_weights(tmp_path / "none.pt", TASK, scale=0.5)
    with pytest.raises(WeightsError, match=r"is a folder"):
        icl.import_weights(tmp_path, TASK, scale=0.5)
    np.save(tmp_path / "weights.npy", np.zeros(3))
    with pytest.raises(WeightsError, match=r"not a weights file by its name \('\.npy'\).*save_file"):
        icl.import_weights(tmp_path / "weights.npy", TASK, scale=0.5)
    for text in (b"hello, these are words", b"\x89PNG\r\n", b"\x80"):
        (tmp_path / "words.pt").write_bytes(text)
        with pytest.raises(WeightsError, match=r"words\.pt"):
            icl.import_weights(tmp_path / "words.pt", TASK, scale=0.5)
    with zipfile.ZipFile(tmp_path / "zip.pt", "w") as archive:
        archive.writestr("x", "y")
    with pytest.raises(WeightsError, match=r"zip\.pt .* is not a file that torch.save wrote"):
        icl.import_weights(tmp_path / "zip.pt", TASK, scale=0.5)
    with pytest.raises(WeightsError, match=r"got a int.*state_dict"):
        icl.import_weights(3, TASK, scale=0.5)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (torch.zeros(3), "holds a Tensor, not weights by name"),
        ([1, 2], "holds a list, not weights by name"),
        ({"epoch": 3}, r"holds no tensors \(it has epoch\)"),
        ({}, r"holds no tensors \(it has nothing\)"),
        ({"q": torch.zeros(2, 2).to_sparse()}, "q is not a plain tensor of real numbers"),
        ({"q": torch.zeros(2, 2, dtype=torch.complex64)}, "q is not a plain tensor of real numbers .complex64"),
        ({r: torch.ones(8, 4, dtype=torch.long) for r in "qkvo"}, "q is torch.int64.*floating point"),
    ],
)
def test_files_without_weights_are_told(content, message: str, tmp_path: Path) -> None:
    torch.save(content, tmp_path / "weights.pt")
    with pytest.raises(WeightsError, match=message):
        icl.import_weights(tmp_path / "weights.pt", TASK, scale=0.5)


@pytest.mark.parametrize(
    "stated",
    [
        "not json",
        "[]",
        json.dumps({"layout": "fused"}),
        json.dumps({"layout": "other", "n_heads": 2, "scale": 1.0}),
        json.dumps({"layout": "fused", "n_heads": 0, "scale": 1.0}),
        json.dumps({"layout": "fused", "n_heads": 2, "scale": -1.0}),
        '{"layout": "fused", "n_heads": 2, "scale": Infinity}',
    ],
)
def test_a_files_own_words_are_checked(stated: str, tmp_path: Path) -> None:
    save_file(STATE, tmp_path / "weights.safetensors", metadata={"icl_mechinterp": stated})
    with pytest.raises(WeightsError, match=r"describes itself in words that cannot be read.*Export it again"):
        icl.import_weights(tmp_path / "weights.safetensors", TASK)


def test_a_runs_own_checkpoint_needs_no_import() -> None:
    with pytest.raises(WeightsError, match=r"checkpoint of a run.*icl-mechinterp probe RUN"):
        icl.import_weights({"model.blocks.0.attn.W_Q": torch.zeros(1), "generator.states": torch.zeros(1)}, TASK)
