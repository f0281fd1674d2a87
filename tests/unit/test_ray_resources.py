"""What a Ray cluster could never hold is refused before it is asked for: Ray itself would wait. Imports Ray, starts none."""

from __future__ import annotations

import pytest

from mfsdp_cli.errors import MACHINE_UNFIT, MfsdpError

NODES = {"10.0.0.1": {"CPU": 8.0, "GPU": 2.0}, "10.0.0.2": {"CPU": 8.0, "GPU": 6.0}}
TOTAL = {"CPU": 16.0, "GPU": 8.0}


def test_gpus_of_an_engine_are_on_one_node():
    from mfsdp_cli.train.ray_group import require_resources

    engine = {"CPU": 1, "GPU": 4}
    require_resources([engine, *[{"CPU": 1, "GPU": 1}] * 4], TOTAL, NODES)  # 4 + 2 on the second node, 2 on the first
    with pytest.raises(MfsdpError, match="2 engines need 4 GPUs of one node each, and there is room for 1; GPUs by node: 10.0.0.1 2; 10.0.0.2 6") as caught:
        require_resources([engine, engine], TOTAL, NODES)  # 8 of 8 GPUs, but 2 + 6
    assert caught.value.exit_code == MACHINE_UNFIT
    with pytest.raises(MfsdpError, match="this run needs 9"):
        require_resources([engine, engine, {"CPU": 1, "GPU": 1}], TOTAL, NODES)
