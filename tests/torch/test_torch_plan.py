"""The rules of negotiation, without any process: tables in, an order out."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from hsgd.torch.negotiation.round_plan import JOIN, RoundPlan
from hsgd.torch.negotiation.signature import Signature
from hsgd.torch.negotiation.stall_inspector import describe, missing

__all__: list[str] = []

ADD = Signature("allreduce", ("float32",), ((3,),), op=1)
BIG = Signature("allreduce", ("float32",), ((1 << 20,),), op=1)
GATHER = Signature("allgather", ("float32",), ((3, 2),))


def test_what_all_ranks_have_is_ready_in_the_order_of_the_first() -> None:
    plan = RoundPlan([[("b", ADD), ("a", ADD), ("c", ADD)], [("a", ADD), ("b", ADD)]])
    assert plan.ready == ["b", "a"]
    assert plan.leftover


def test_nothing_is_left_over_when_all_have_the_same() -> None:
    assert not RoundPlan([[("a", ADD)], [("a", ADD)]]).leftover


def test_small_neighbours_travel_together_and_others_alone() -> None:
    table = [("a", ADD), ("b", ADD), ("g", GATHER), ("c", ADD), ("big", BIG), ("d", ADD)]
    assert list(RoundPlan([table, table]).batches()) == [["a", "b"], ["g"], ["c"], ["big"], ["d"]]


def test_different_ops_do_not_travel_together() -> None:
    table = [("a", ADD), ("b", ADD._replace(op=3)), ("c", ADD._replace(scales=(2.0, 1.0)))]
    assert list(RoundPlan([table, table]).batches()) == [["a"], ["b"], ["c"]]


def test_a_failing_operation_does_not_travel_with_others() -> None:
    table = [("a", ADD), ("b", ADD)]
    other = [("a", ADD), ("b", ADD._replace(shapes=((4,),)))]
    plan = RoundPlan([table, other])
    assert list(plan.batches()) == [["a"], ["b"]]
    assert plan.error("a") is None
    assert "tensor shapes: One rank sent a tensor of shape (3,)" in (plan.error("b") or "")


def test_each_difference_has_its_words() -> None:
    cases = {
        "Mismatched operations: One rank did an ALLREDUCE": GATHER,
        "Mismatched data types: One rank had type float32": ADD._replace(dtypes=("int32",)),
        "Mismatched ALLREDUCE tensor shapes": ADD._replace(shapes=((3, 1),)),
        "Mismatched prescale and/or postscale factors": ADD._replace(scales=(0.5, 1.0)),
        "Mismatched reduction operation": ADD._replace(op=4),
        "Mismatched allreduce: one rank gave": ADD._replace(detail="grouped"),
    }
    for words, other in cases.items():
        assert (ADD.mismatch(other) or "").startswith(words)
    root = Signature("broadcast", ("float32",), ((3,),), root=0)
    assert "BROADCAST root ranks" in (root.mismatch(root._replace(root=1)) or "")


def test_rows_of_gathered_tensors_may_differ_and_columns_may_not() -> None:
    assert GATHER.mismatch(GATHER._replace(shapes=((9, 2),))) is None
    assert GATHER.mismatch(GATHER._replace(shapes=((3, 3),))) is not None
    assert RoundPlan([[("a", GATHER._replace(shapes=((),)))]]).error("a") is not None


def test_ranks_that_have_joined_are_not_waited_for() -> None:
    plan = RoundPlan([[(JOIN, Signature("join"))], [("a", ADD), ("g", GATHER)]])
    assert plan.ready == ["a", "g"]
    assert plan.signature("a") == ADD
    assert plan.error("a") is None
    assert "not supported with Join" in (plan.error("g") or "")
    assert plan.leftover


def test_all_have_joined() -> None:
    table = [(JOIN, Signature("join"))]
    plan = RoundPlan([table, table])
    assert plan.ready == [JOIN]
    assert plan.error(JOIN) is None
    assert not plan.leftover


@settings(max_examples=200, derandomize=True, database=None)
@given(st.lists(st.permutations(list("abcdef")), min_size=1, max_size=4), st.data())
def test_every_operation_is_run_once_whatever_the_orders(
    orders: list[list[str]], data: st.DataObject
) -> None:
    tables = [[(name, ADD) for name in order[: data.draw(st.integers(0, 6))]] for order in orders]
    plan = RoundPlan(tables)
    common = set.intersection(*({name for name, _ in table} for table in tables))
    assert sorted(plan.ready) == sorted(common)
    assert [name for batch in plan.batches() for name in batch] == plan.ready
    assert plan.leftover == any(name not in common for table in tables for name, _ in table)


def test_the_stall_report_names_tensors_and_missing_ranks() -> None:
    tables = [{(0, "a"): 9.0, (0, "b"): 1.0}, {(0, "b"): 1.0}, {(0, "c"): 9.0, (0, JOIN): 9.0}]
    found = missing(tables, lambda _: [0, 1, 2], 5.0)
    assert found == {(0, "a"): [1], (0, "c"): [0, 1]}
    text = describe(found, 5.0)
    assert "more than 5 seconds" in text
    assert "Missing ranks: 1 [a]" in text and "Missing ranks: 0, 1 [c]" in text


def test_only_members_of_a_process_set_are_missed() -> None:
    assert missing([{(1, "a"): 9.0}, {}, {}], lambda _: [0, 2], 5.0) == {(1, "a"): [2]}
