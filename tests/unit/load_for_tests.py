"""Settings loaded without the environment of whoever runs the tests."""

from mfsdp_cli.config.load import load as load_kind


def load(*assignments, kind="sft", **kwargs):
    return load_kind(kind, assignments=assignments, **({"environ": {}} | kwargs))


def errors(loaded):
    return [p for p in loaded.problems if p.level == "error"]


def only_error(loaded):
    found = errors(loaded)
    assert len(found) == 1, found
    return found[0]
