from icl_mechinterp.errors import ConfigError, nearest


def test_within_names_the_field_from_further_out() -> None:
    error = ConfigError("d must be at least 1; got 0.", field="d").within("task")
    assert (str(error), error.field) == ("task.d must be at least 1; got 0.", "task.d")


def test_within_changes_no_other_word() -> None:
    error = ConfigError("the model needs d; got none.", field="d").within("task")
    assert (str(error), error.field) == ("the model needs d; got none.", "task.d")
    assert str(ConfigError("something else").within("task")) == "something else"


def test_nearest_speaks_only_of_what_resembles() -> None:
    assert nearest("nose", ["noise", "context"]) == " Did you mean 'noise'?"
    assert nearest("zzz", ["noise", "context"]) == ""
