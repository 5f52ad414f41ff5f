"""torch's own tests of torch.distributed: none that passes over gloo fails over hsgd."""

from __future__ import annotations

import pytest

from torch_suite import BACKENDS, outcomes, worse

__all__: list[str] = []

pytestmark = pytest.mark.long

# A few of each kind; `make test-torch` runs all, on 3 and 4 ranks.
FEW = (
    *("test_all_reduce_sum", "test_all_reduce_sum_async", "test_all_reduce_full_group_max"),
    *("test_all_reduce_coalesced_sum", "test_all_gather_coalesced_simple", "test_reduce_product"),
    *("test_all_gather", "test_broadcast_full_group", "test_all_gather_object_default_pg"),
    *("test_barrier_timeout_full_group", "test_monitored_barrier_gloo", "test_send_recv"),
    *("test_isend", "test_get_backend", "test_scatter", "test_gather", "test_ddp_create_graph"),
    *("test_DistributedDataParallelCPU", "test_DistributedDataParallelCPU_grad_is_view"),
    *("test_ddp_logging_data_cpu", "test_dump_DDP_relevant_env_vars"),
)


@pytest.fixture(scope="module")
def gloos() -> dict[str, str]:
    return outcomes("gloo", FEW)


def test_all_of_them_pass_over_gloo(gloos: dict[str, str]) -> None:
    assert set(gloos.values()) == {"passed"}


@pytest.mark.parametrize("over", BACKENDS[1:])
def test_what_passes_over_gloo_passes_over_hsgd(gloos: dict[str, str], over: str) -> None:
    found = outcomes(over, FEW)
    assert worse(found, gloos, skips=over == "hsgd") == {}
