"""States of a loader at every point of a job: no sample comes twice, none is lost."""

from __future__ import annotations

import json

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from hdf5_samples import make_slabs
from loaders import loader_of

__all__: list[str] = []

SAMPLES = 23
OPTIONS = {"block_bytes": 200, "window_bytes": 900, "as_numpy": True, "pad": False, "seed": 3}
RANKS = {"size": st.integers(1, 3), "batch": st.integers(1, 4)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_slabs(tmp_path_factory.mktemp("states") / "data", SAMPLES, 4)


class Job(RuleBasedStateMachine):
    """Ranks that take steps together; `seen` are the samples of this epoch."""

    folder = None

    @initialize(**RANKS)
    def start(self, size, batch):
        self.epoch, self.seen, self.before = 0, [], []
        self.running, self.is_over = [], False  # is_over: the next iteration is the next epoch
        self.make(size, batch)

    def make(self, size, batch):
        self.interrupting = False
        options = OPTIONS | {"transform": self.transform}
        self.loaders = [
            loader_of(self.folder, batch, rank, size, **options) for rank in range(size)
        ]

    def transform(self, batch):
        if self.interrupting:
            raise KeyboardInterrupt
        return batch

    @precondition(lambda self: not self.running)
    @rule()
    def begin(self):
        if self.is_over:
            self.epoch, self.seen = self.epoch + 1, []
        self.before, self.is_over = list(self.seen), False
        self.running = [iter(loader) for loader in self.loaders]
        assert {loader.epoch for loader in self.loaders} == {self.epoch}

    @precondition(lambda self: self.running)
    @rule(steps=st.integers(1, 9))
    def take(self, steps):
        for _ in range(steps):
            batches = [next(each, None) for each in self.running]
            ended = [batch is None for batch in batches]
            assert len(set(ended)) == 1, "ranks have different numbers of steps"
            self.is_over = True
            if ended[0]:
                assert sorted(self.seen) == list(range(SAMPLES))
                self.running = []
                return
            self.seen += [number for batch in batches for number in batch["number"].tolist()]
            assert len(self.seen) == len(set(self.seen)), "a sample came twice"

    @precondition(lambda self: self.running)
    @rule()
    def leave(self):
        for each in self.running:
            each.close()
        self.running = []

    @precondition(lambda self: self.running)
    @rule(**RANKS)
    def interrupt(self, size, batch):
        """Press Ctrl-C while each rank waits for a batch, and start again from the states."""
        self.interrupting = True
        for each in self.running:
            try:
                self.is_over |= next(each, None) is None
            except KeyboardInterrupt:
                continue
        self.resume(size, batch)

    @rule(**RANKS)
    def resume(self, size, batch):
        states = [json.dumps(loader.state_dict()) for loader in self.loaders]
        assert len(set(states)) == 1
        ended = json.loads(states[0])["ended"]
        self.leave()
        for loader in self.loaders:
            loader.close()
        self.make(size, batch)
        for loader in self.loaders:
            loader.load_state_dict(json.loads(states[0]))
        self.is_over, self.before = ended, list(self.seen)

    @precondition(lambda self: not self.running)
    @rule(ahead=st.integers(0, 2))
    def set_epoch(self, ahead):
        for loader in self.loaders:
            loader.set_epoch(self.epoch + ahead)
        self.seen = [] if ahead else list(self.before)
        self.epoch, self.before, self.is_over = self.epoch + ahead, list(self.seen), False

    def teardown(self):
        for loader in getattr(self, "loaders", []):
            loader.close()


@pytest.mark.parametrize(
    "examples", [pytest.param(15, id="few"), pytest.param(150, id="many", marks=pytest.mark.long)]
)
def test_samples_come_once_whatever_a_job_does(folder, examples):
    Here = type("Here", (Job,), {"folder": folder})
    case = Here.TestCase
    case.settings = settings(max_examples=examples, stateful_step_count=20, deadline=None)
    case().runTest()
