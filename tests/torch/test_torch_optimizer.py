"""DistributedOptimizer without Horovod: ranks with parts of a batch train like one with all of it,
whatever the buckets, the order of gradients and what the script does between backward and step."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from ranks import Ranks, Seat, meeting_point
from torch_job import job

__all__: list[str] = []

MOST_RANKS = 4
STEPS, ROWS = 5, 4


def on(ranks: Ranks, size: int, function: Any, *args: Any) -> list[Any]:
    return ranks.run(function, meeting_point(), size, *args, on=range(size))


class Net(nn.Module):
    """Has convolutions with other strides, a layer that may stay unused, and two dtypes."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 4, 3).to(memory_format=torch.channels_last)
        self.spare = nn.Linear(144, 144)
        self.last = nn.Linear(144, 3)
        self.shift = nn.Parameter(torch.zeros(3, dtype=torch.float64))
        self.to(dtype) if dtype != torch.float32 else None

    def forward(self, images: Tensor, *, spare: bool = True) -> Tensor:
        hidden = functional.relu(self.first(images)).flatten(1)
        hidden = self.spare(hidden) if spare else hidden
        return self.last(hidden) + self.shift.to(hidden.dtype)


def data(step: int, size: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    images = torch.randn(size * ROWS, 1, 8, 8, generator=generator)
    return images, torch.randint(0, 3, (size * ROWS,), generator=generator)


def whole(size: int, passes: int = 1, spare: Callable[[int, int], bool] | None = None) -> Net:
    """Trained on one rank with all data; `spare` tells which parts use that layer."""
    torch.manual_seed(3)
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)
    for step in range(STEPS):
        optimizer.zero_grad()
        for p in range(passes):
            images, labels = data(step * passes + p, size)
            for rank in range(size):
                part = slice(rank * ROWS, (rank + 1) * ROWS)
                used = spare is None or spare(step, rank)
                output = net(images[part], spare=used)
                (functional.cross_entropy(output, labels[part]) / size).backward()
        for parameter in net.parameters():  # Horovod gives unused parameters zeros
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
    return net


def distributed(
    hvd: Any,
    rank: int,
    passes: int = 1,
    spare: Callable[[int, int], bool] | None = None,
    set_to_none: bool = True,
    **options: Any,
) -> Net:
    """The same over all ranks."""
    torch.manual_seed(3)
    net = Net()
    if options.get("groups") == "lists":
        options["groups"] = [[net.last.weight, net.shift], [net.first.bias]]
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)
    optimizer = hvd.DistributedOptimizer(
        optimizer, net.named_parameters(), backward_passes_per_step=passes, **options
    )
    assert isinstance(optimizer, torch.optim.SGD)
    for step in range(STEPS):
        optimizer.zero_grad(set_to_none=set_to_none)
        for p in range(passes):
            images, labels = data(step * passes + p, hvd.size())
            part = slice(rank * ROWS, (rank + 1) * ROWS)
            used = spare is None or spare(step, rank)
            functional.cross_entropy(net(images[part], spare=used), labels[part]).backward()
        optimizer.step()
    return net


def close(one: nn.Module, other: nn.Module, tolerance: float = 1e-6) -> bool:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return all(torch.allclose(a, b, atol=tolerance, rtol=tolerance) for a, b in pairs)


VARIANTS: dict[str, dict[str, Any]] = {
    "default": {},
    "one bucket for each parameter": {"bucket_cap_mb": 1e-6},
    "two groups": {"groups": 2},
    "lists": {"groups": "lists"},
    "after backward": {"strategy": "after_backward", "bucket_cap_mb": 1e-3},
    "predivided": {"gradient_predivide_factor": 2.0},
    "zeroed": {"set_to_none": False},
    "three passes": {"passes": 3},
}


def variants(seat: Seat, path: str, size: int) -> list[str]:
    with job(seat, path, size) as hvd:
        return [
            name
            for name, options in VARIANTS.items()
            if not close(
                distributed(hvd, seat.rank, **options), whole(size, options.get("passes", 1))
            )
        ]


@pytest.mark.long
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_it_trains_like_one_rank_with_the_whole_batch(ranks: Ranks, size: int) -> None:
    assert on(ranks, size, variants) == [[]] * size


def compressed(seat: Seat, path: str, size: int) -> None:
    with job(seat, path, size) as hvd:
        expected = whole(size)
        for compression in (hvd.Compression.fp16, hvd.Compression.bf16):
            net = distributed(hvd, seat.rank, compression=compression)
            assert close(net, expected, 2e-2) and not close(net, expected, 1e-8)

        class Halved(hvd.Compression.none):  # type: ignore[misc,name-defined]
            @staticmethod
            def compress(tensor: Tensor) -> tuple[Tensor, Any]:
                return tensor / 2, None

            @staticmethod
            def decompress(tensor: Tensor, ctx: Any) -> Tensor:
                return tensor * 2

        assert close(distributed(hvd, seat.rank, compression=Halved), expected)


@pytest.mark.long
def test_compression_is_of_what_travels_only(ranks: Ranks) -> None:
    on(ranks, 2, compressed)


def unused(seat: Seat, path: str, size: int) -> None:
    with job(seat, path, size) as hvd:
        for spare in (
            lambda step, rank: step > 1,  # not in the first steps
            lambda step, rank: (step + rank) % 2 == 0,  # on some ranks, in turn
            lambda step, rank: False,
        ):
            net = distributed(hvd, seat.rank, spare=spare, bucket_cap_mb=1e-3)
            assert close(net, whole(size, spare=spare))


@pytest.mark.parametrize("size", [2, 3])
def test_parameters_may_be_unused_on_some_ranks(ranks: Ranks, size: int) -> None:
    on(ranks, size, unused)


# --- between backward and step ---


def clipped(seat: Seat, path: str, size: int) -> None:
    with job(seat, path, size) as hvd:
        model = nn.Linear(3, 1)
        hvd.broadcast_parameters(model.state_dict(), 0)
        start = copy.deepcopy(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
        (model(torch.full((1, 3), 100.0 * (seat.rank + 1)))).sum().backward()
        optimizer.synchronize()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        with optimizer.skip_synchronize():
            optimizer.step()
        change = torch.cat([(a - b).flatten() for a, b in _pairs(model, start)])
        assert change.norm().item() == pytest.approx(1.0, abs=1e-4)
        optimizer.zero_grad()
        model(torch.ones(1, 3)).sum().backward()
        optimizer.synchronize()
        with pytest.warns(UserWarning, match="without optimizer.skip_synchronize"):
            optimizer.step()


def _pairs(one: nn.Module, other: nn.Module) -> Iterator[tuple[Tensor, Tensor]]:
    return zip(one.parameters(), other.parameters(), strict=True)  # type: ignore[return-value]


def test_gradients_are_clipped_after_synchronize(ranks: Ranks) -> None:
    on(ranks, 2, clipped)


def scaled(seat: Seat, path: str, size: int) -> None:
    with job(seat, path, size) as hvd:
        model = nn.Linear(2, 1)
        hvd.broadcast_parameters(model.state_dict(), 0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for step in range(3):
            optimizer.zero_grad()
            before = model.weight.detach().clone()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = model(torch.ones(2, 2) * (seat.rank + 1)).float().sum()
            if step == 1 and seat.rank == 1:
                loss = loss * float("inf")
            scaler.scale(loss).backward()
            optimizer.synchronize()
            scaler.unscale_(optimizer)
            with optimizer.skip_synchronize():
                scaler.step(optimizer)
            scaler.update()
            changed = not torch.equal(before, model.weight)
            assert changed == (step != 1)  # an overflow of one rank holds for all
        weights = hvd.allgather(model.weight.detach())
        assert torch.equal(weights[0], weights[1])


@pytest.mark.long
def test_a_gradient_scaler_skips_the_same_steps_on_all_ranks(ranks: Ranks) -> None:
    on(ranks, 2, scaled)


def too_often(seat: Seat, path: str, size: int) -> None:
    with job(seat, path, size) as hvd:
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), op=hvd.Sum)
        model(torch.ones(1, 2)).sum().backward()
        with pytest.raises(AssertionError, match=r"set backward_passes_per_step"):
            model(torch.ones(1, 2)).sum().backward()
        optimizer.zero_grad()
        assert model.weight.grad is None
        optimizer.set_backward_passes_per_step(2)
        assert optimizer.backward_passes_per_step == 2
        for _ in range(2):
            model(torch.ones(1, 2) * (seat.rank + 1)).sum().backward()
        optimizer.step()
        assert model.weight.grad is not None
        assert model.weight.grad.tolist() == [[6.0, 6.0]]


def test_sums_of_more_passes_than_announced_are_refused_and_can_be_announced(ranks: Ranks) -> None:
    on(ranks, 2, too_often)


# --- several optimizers, groups that come later, what begins and stops to need gradients ---


def adversaries(seat: Seat, path: str, size: int) -> None:
    """The generator's backward reaches the discriminator, which is not stepped then."""
    with job(seat, path, size) as hvd:
        torch.manual_seed(0)
        nets = {"g": nn.Linear(2, 2), "d": nn.Linear(2, 1)}
        twins = copy.deepcopy(nets)
        created = {
            name: hvd.DistributedOptimizer(
                torch.optim.SGD(net.parameters(), lr=0.1), net.named_parameters(name)
            )
            for name, net in nets.items()
        }
        plain = {n: torch.optim.SGD(net.parameters(), lr=0.1) for n, net in twins.items()}
        for step in range(4):
            noise = torch.randn(size, 2, generator=torch.Generator().manual_seed(step))
            for models, optimizers, rows in (
                (nets, created, slice(seat.rank, seat.rank + 1)),
                (twins, plain, slice(None)),
            ):
                fake = models["g"](noise[rows])
                optimizers["d"].zero_grad()
                models["d"](fake.detach()).mean().backward()
                optimizers["d"].step()
                optimizers["g"].zero_grad()
                (-models["d"](fake)).mean().backward()
                optimizers["g"].step()
        assert all(close(nets[name], twins[name]) for name in nets)


@pytest.mark.parametrize("size", [2, 3])
def test_two_optimizers_whose_networks_feed_each_other(ranks: Ranks, size: int) -> None:
    on(ranks, size, adversaries)


def growing(seat: Seat, path: str, size: int) -> None:
    with job(seat, path, size) as hvd:
        net, twin = (nn.ModuleList([nn.Linear(2, 2) for _ in range(3)]) for _ in range(2))
        hvd.broadcast_parameters(net.state_dict(), 0)
        twin.load_state_dict(net.state_dict())
        for model in (net, twin):
            model[1].requires_grad_(False)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD([*net[0].parameters(), *net[1].parameters()], lr=0.1),
            bucket_cap_mb=1e-5,
        )
        plain = torch.optim.SGD([*twin[0].parameters(), *twin[1].parameters()], lr=0.1)
        for step in range(8):
            if step == 2:
                optimizer.add_param_group({"params": list(net[2].parameters()), "lr": 0.2})
                plain.add_param_group({"params": list(twin[2].parameters()), "lr": 0.2})
            for model in (net, twin):
                if step == 4:
                    model[1].requires_grad_(True)
                if step == 6:
                    model[0].requires_grad_(False)
            rows = torch.randn(size, 2, generator=torch.Generator().manual_seed(step))
            for model, one, part in (
                (net, optimizer, slice(seat.rank, seat.rank + 1)),
                (twin, plain, slice(None)),
            ):
                one.zero_grad()
                model[2](model[1](model[0](rows[part]))).pow(2).mean().backward()
                one.step()
            assert close(net, twin), step


@pytest.mark.parametrize("size", [2, 3])
def test_groups_and_gradients_that_come_later_are_reduced(ranks: Ranks, size: int) -> None:
    on(ranks, size, growing)


def sparse(seat: Seat, path: str, size: int) -> None:
    with job(seat, path, size) as hvd:
        for dense, kind in ((False, torch.optim.SparseAdam), (True, torch.optim.SparseAdam)):
            torch.manual_seed(0)
            table, twin = nn.Embedding(7, 2, sparse=True), nn.Embedding(7, 2, sparse=True)
            twin.load_state_dict(table.state_dict())
            optimizer = hvd.DistributedOptimizer(
                kind(list(table.parameters()), lr=0.1),
                table.named_parameters(),
                sparse_as_dense=dense,
            )
            plain = kind(list(twin.parameters()), lr=0.1)
            for step in range(3):
                optimizer.zero_grad()
                plain.zero_grad()
                table(torch.tensor([seat.rank, step])).pow(2).sum().backward()
                places = torch.tensor([place for r in range(size) for place in (r, step)])
                (twin(places).pow(2).sum() / size).backward()
                optimizer.step()
                plain.step()
            assert close(table, twin)


def test_sparse_gradients(ranks: Ranks) -> None:
    on(ranks, 2, sparse)


def in_a_set(seat: Seat, path: str, size: int) -> None:
    from hsgd.torch import ProcessSet

    pair = ProcessSet([0, 2])
    with job(seat, path, size, process_sets=[pair]) as hvd:
        model = nn.Linear(1, 1, bias=False)
        nn.init.ones_(model.weight)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=1.0), model.named_parameters(), process_set=pair
        )
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.tensor([[float(seat.rank)]])).sum().backward()
            optimizer.step()
        assert model.weight.item() == 1 - 2 * (1 if seat.rank != 1 else seat.rank)


@pytest.mark.long
def test_a_process_set_trains_by_itself(ranks: Ranks) -> None:
    on(ranks, 3, in_a_set)


# --- around torch ---


def compiled(seat: Seat, path: str, size: int) -> None:
    with job(seat, path, size) as hvd:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))
        twin = copy.deepcopy(model)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters()
        )
        plain = torch.optim.SGD(twin.parameters(), lr=0.1)
        fast = torch.compile(model, backend="aot_eager")
        for step in range(3):
            rows = torch.randn(size, 2, generator=torch.Generator().manual_seed(step))
            optimizer.zero_grad()
            fast(rows[seat.rank : seat.rank + 1]).mean().backward()
            optimizer.step()
            plain.zero_grad()
            twin(rows).mean().backward()
            plain.step()
        assert close(model, twin)


@pytest.mark.long
def test_a_compiled_model() -> None:
    with Ranks(2) as pool:  # torch.compile leaves semaphores until its process ends
        on(pool, 2, compiled)


def scheduled_and_saved(seat: Seat, path: str, size: int) -> None:
    with job(seat, path, size) as hvd, warnings.catch_warnings():
        warnings.simplefilter("error")
        model = nn.Linear(2, 1)
        hvd.broadcast_parameters(model.state_dict(), 0)
        base = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5)
        early = torch.optim.lr_scheduler.StepLR(base, 1, 0.5)
        optimizer = hvd.DistributedOptimizer(base, model.named_parameters())
        late = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        seen = []
        optimizer.register_step_post_hook(lambda *_: seen.append(1))
        model(torch.ones(1, 2) * seat.rank).sum().backward()
        optimizer.step()
        assert model.weight.grad is not None and model.weight.grad.tolist() == [[0.5, 0.5]]
        late.step()
        assert optimizer.param_groups[0]["lr"] == 0.5 and seen == [1]
        saved = copy.deepcopy(optimizer.state_dict())
        optimizer.step()
        optimizer.load_state_dict(saved)
        assert optimizer.param_groups[0]["lr"] == 0.5
        assert early.get_last_lr() == [1.0]


@pytest.mark.long
def test_schedulers_hooks_and_state_dicts_see_an_optimizer(ranks: Ranks) -> None:
    on(ranks, 2, scheduled_and_saved)


def other_models(seat: Seat, path: str, size: int) -> None:
    with job(seat, path, size) as hvd:
        model = nn.Linear(2 + seat.rank, 1)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=1.0), model.named_parameters()
        )

        def train() -> None:
            model(torch.ones(1, 2 + seat.rank)).sum().backward()
            optimizer.step()

        with pytest.raises(hvd.HorovodInternalError, match=r"weight is .* of shape \(1, 3\)"):
            train()


@pytest.mark.long
def test_different_models_are_told_by_parameter(ranks: Ranks) -> None:
    on(ranks, 2, other_models)


def twice_in_one_process(seat: Seat, paths: list[str], size: int) -> None:
    model = nn.Linear(2, 1)
    optimizer: Any = None
    for path in paths:
        with job(seat, path, size) as hvd:
            hvd.broadcast_parameters(model.state_dict(), 0)
            if optimizer is None:
                optimizer = hvd.DistributedOptimizer(
                    torch.optim.SGD(model.parameters(), lr=1.0), model.named_parameters()
                )
            for _ in range(2):
                optimizer.zero_grad()
                model(torch.ones(1, 2) * seat.rank).sum().backward()
                optimizer.step()
            weights = hvd.allgather(model.weight.detach())
            assert torch.equal(weights[0], weights[1])


def test_it_goes_on_after_shutdown_and_init(ranks: Ranks) -> None:
    paths = [meeting_point(), meeting_point()]
    ranks.run(twice_in_one_process, paths, 2, on=range(2))


def overlapping(seat: Seat, path: str, size: int) -> list[int]:
    with job(seat, path, size) as hvd:
        torch.manual_seed(3)
        model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(4)))
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), bucket_cap_mb=1e-6, strategy="overlap"
        )
        launched = []
        for step in range(2):
            optimizer.zero_grad()
            hidden = torch.ones(1, 8)
            for layer in model:
                hidden = layer(hidden)
                if step:
                    hidden.register_hook(lambda _: launched.append(optimizer._reducer._next))
            hidden.sum().backward()
            optimizer.step()
        return launched


@pytest.mark.long
def test_buckets_start_while_backward_runs(ranks: Ranks) -> None:
    # A gradient of a layer's output comes before that of its weight, and a bucket starts with the
    # next gradient: hooks of the script act on its own first.
    assert on(ranks, 2, overlapping) == [[0, 0, 1, 2]] * 2


def train_shared(seat: Seat, path: str, size: int, node_shared: bool) -> list[Any]:
    with job(seat, path, size) as hvd:
        torch.manual_seed(seat.rank)
        net = Net()
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9),
            named_parameters=net.named_parameters(),
            node_shared=node_shared,
        )
        hvd.broadcast_parameters(net.state_dict(), root_rank=0)
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        for step in range(STEPS):
            optimizer.zero_grad()
            images, labels = data(step, size)
            mine = slice(hvd.rank() * ROWS, (hvd.rank() + 1) * ROWS)
            functional.cross_entropy(net(images[mine]), labels[mine]).backward()
            optimizer.synchronize()
            with optimizer.skip_synchronize():
                optimizer.step()
            if step == 2:
                hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        buffers = optimizer.state_dict()["state"]
        return [
            *(parameter.detach().tolist() for parameter in net.parameters()),
            *(buffers[n]["momentum_buffer"].tolist() for n in sorted(buffers)),
        ]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_node_shared_parameters_train_to_the_same_weights(ranks: Ranks, size: int) -> None:
    shared = on(ranks, size, train_shared, True)
    usual = on(ranks, size, train_shared, False)
    assert shared == [shared[0]] * size
    for ours, theirs in zip(shared[0], usual[0], strict=True):  # a convolution's strides differ
        torch.testing.assert_close(torch.tensor(ours), torch.tensor(theirs), rtol=1e-4, atol=1e-6)


def train_on_noise(net: nn.Module, optimizer: Any, rank: int) -> None:
    for step in range(STEPS):
        torch.manual_seed(10 * step + rank)
        optimizer.zero_grad()
        net(torch.randn(ROWS, 7)).square().mean().backward()
        optimizer.step()


def train_by_tree(seat: Seat, path: str, size: int, strategy: str) -> list[Any]:
    with job(seat, path, size) as hvd:
        torch.manual_seed(3)
        net = nn.Sequential(nn.Linear(7, 9), nn.Tanh(), nn.Linear(9, 3))
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9),
            named_parameters=net.named_parameters(),
            strategy=strategy,
            model=net,
        )
        train_on_noise(net, optimizer, seat.rank)
        if strategy == "notified_tree":
            optimizer.wait()
        return [parameter.detach().tolist() for parameter in net.parameters()]


@pytest.mark.parametrize("size", [1, 3])
def test_a_tree_trains_to_the_same_weights(ranks: Ranks, size: int) -> None:
    tree = on(ranks, size, train_by_tree, "notified_tree")
    usual = on(ranks, size, train_by_tree, "overlap")
    for rank in range(size):
        for ours, theirs in zip(tree[rank], usual[rank], strict=True):
            torch.testing.assert_close(torch.tensor(ours), torch.tensor(theirs))


def trees_that_cannot_be_planted(seat: Seat, path: str, size: int) -> None:
    with job(seat, path, size) as hvd:
        net = nn.Linear(1, 1)
        sgd = torch.optim.SGD(net.parameters(), lr=1.0)
        with pytest.raises(ValueError, match=r'^strategy="notified_tree" needs model='):
            hvd.DistributedOptimizer(sgd, strategy="notified_tree")
        foreign = {"model": nn.Linear(1, 1), "named_parameters": net.named_parameters()}
        refused: list[tuple[dict[str, Any], str]] = [
            ({"op": hvd.Sum}, " averages; op is 1"),
            ({"compression": hvd.Compression.fp16}, " does not know compression="),
            ({"backward_passes_per_step": 2}, r" .*=2; use no_sync\(\)"),
            (foreign, ': the named parameter "weight" is not one of model'),
        ]
        for options, words in refused:
            with pytest.raises(ValueError, match=f'^strategy="notified_tree"{words}'):
                hvd.DistributedOptimizer(sgd, strategy="notified_tree", **{"model": net, **options})


def test_arguments_without_meaning_for_a_tree_are_refused(ranks: Ranks) -> None:
    on(ranks, 1, trees_that_cannot_be_planted)


def train_elastically(seat: Seat, path: str, size: int, strategy: str) -> Any:
    with job(seat, path, size) as hvd:
        torch.manual_seed(seat.rank)
        net = nn.Sequential(nn.Linear(7, 9), nn.Tanh(), nn.Linear(9, 3))
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(net.parameters(), lr=0.1),
            named_parameters=net.named_parameters(),
            strategy=strategy,
            model=net,
            strategy_options={"moving_rate": 0.2, "update_interval": 2},
        )
        train_on_noise(net, optimizer, seat.rank)
        report = optimizer.workers, optimizer.moving_rate, optimizer.metrics().exchanges
        optimizer.close()
        return report, [parameter.detach().tolist() for parameter in net.parameters()]


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["easgd_async", "easgd_hybrid"])
def test_elastic_averaging_is_reached_by_its_strategies(ranks: Ranks, strategy: str) -> None:
    reports = on(ranks, 2, train_elastically, strategy)
    workers = 2 if strategy == "easgd_async" else 1
    assert [row[0] for row in reports] == [(workers, 0.2, STEPS // 2)] * 2
    assert (reports[0][1] == reports[1][1]) is (strategy == "easgd_hybrid")


def elastic_options_that_cannot_be(seat: Seat, path: str, size: int) -> None:
    with job(seat, path, size) as hvd:
        sgd = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=1.0)
        with pytest.raises(ValueError, match=r'^strategy="easgd_async" does not know compr'):
            hvd.DistributedOptimizer(sgd, strategy="easgd_async", compression=hvd.Compression.fp16)
        with pytest.raises(ValueError, match=r'^strategy="easgd_hybrid" averages; op is'):
            hvd.DistributedOptimizer(sgd, strategy="easgd_hybrid", op=hvd.Sum)
        with pytest.raises(ValueError, match=r"^strategy_options are for gossip, diloco, easgd"):
            hvd.DistributedOptimizer(sgd, strategy_options={"moving_rate": 0.5})


def test_arguments_without_meaning_for_elastic_averaging_are_refused(ranks: Ranks) -> None:
    on(ranks, 1, elastic_options_that_cannot_be)


def strategies_with_another_op(seat: Seat, path: str, size: int) -> None:
    with job(seat, path, size) as hvd:
        from hsgd.torch.strategy_table import STRATEGIES

        net = nn.Linear(1, 1)
        sgd = torch.optim.SGD(net.parameters(), lr=1.0)
        for strategy in STRATEGIES:
            with pytest.raises(ValueError, match=f'^strategy="{strategy}" averages; op is'):
                hvd.DistributedOptimizer(sgd, strategy=strategy, model=net, op=hvd.Adasum)
        with pytest.raises(ValueError, match=r"^strategy_options are for gossip"):
            hvd.DistributedOptimizer(sgd, op=hvd.Adasum, strategy_options={"moving_rate": 0.5})


@pytest.mark.parametrize("size", [1, 2])
def test_adasum_and_a_strategy_that_averages_are_refused_together(ranks: Ranks, size: int) -> None:
    on(ranks, size, strategies_with_another_op)


def train_by_hand(seat: Seat, path: str, size: int) -> list[list[float]]:
    """share_parameters() from rank 1, and an optimizer of hsgd.optim on what it returns."""
    with job(seat, path, size) as hvd:
        from hsgd.optim import NodeSharedOptimizer

        torch.manual_seed(seat.rank)
        net = nn.Sequential(nn.Linear(7, 9), nn.Tanh(), nn.Linear(9, 3))
        shared = hvd.share_parameters(net, root_rank=1)
        assert shared.parameters == list(net.parameters())
        sgd = torch.optim.SGD(net.parameters(), lr=0.1)
        train_on_noise(net, NodeSharedOptimizer(sgd, shared), seat.rank)
        hvd.barrier()
        return [parameter.flatten().tolist() for parameter in net.parameters()]


@pytest.mark.long
def test_parameters_are_shared_by_hand(ranks: Ranks) -> None:
    first, second = on(ranks, 2, train_by_hand)
    assert first == second
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(7, 9), nn.Tanh(), nn.Linear(9, 3))
    plain = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(STEPS):
        plain.zero_grad()
        for rank in range(2):
            torch.manual_seed(10 * step + rank)
            (net(torch.randn(ROWS, 7)).square().mean() / 2).backward()
        plain.step()
    for ours, theirs in zip(first, net.parameters(), strict=True):
        torch.testing.assert_close(torch.tensor(ours), theirs.detach().flatten())


def options_that_cannot_be_shared(seat: Seat, path: str, size: int) -> None:
    with job(seat, path, size) as hvd:
        parameters = list(nn.Linear(1, 1).parameters())
        sgd = torch.optim.SGD(parameters, lr=1.0)
        with pytest.raises(ValueError, match=r"^node_shared: compression, op cannot be given"):
            hvd.DistributedOptimizer(
                sgd, node_shared=True, op=hvd.Sum, compression=hvd.Compression.fp16
            )
        for groups in (2, [parameters]):
            with pytest.raises(ValueError, match=r"^node_shared: groups cannot be given.*buckets$"):
                hvd.DistributedOptimizer(sgd, node_shared=True, groups=groups)
        words = r"^node_shared: bucket_cap_mb, strategy cannot be given; .* there are no buckets$"
        with pytest.raises(ValueError, match=words):
            hvd.DistributedOptimizer(sgd, node_shared=True, bucket_cap_mb=4.0, strategy="overlap")
        for strategy in ("notified_tree", "gossip", "easgd_async"):
            words = rf'^strategy="{strategy}" does not know bucket_cap_mb=4.0; leave it out'
            with pytest.raises(ValueError, match=words):
                hvd.DistributedOptimizer(
                    sgd, strategy=strategy, bucket_cap_mb=4.0, model=nn.Linear(1, 1)
                )
        with pytest.raises(ValueError, match=r"^node_shared: Adagrad is not supported"):
            hvd.DistributedOptimizer(torch.optim.Adagrad(parameters), node_shared=True)


def test_what_cannot_be_shared_is_refused(ranks: Ranks) -> None:
    on(ranks, 1, options_that_cannot_be_shared)


def train_embedding(seat: Seat, path: str, size: int, node_shared: bool) -> list[list[float]]:
    with job(seat, path, size) as hvd:
        torch.manual_seed(0)
        net = nn.Embedding(11, 3, sparse=True)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(net.parameters(), lr=0.5, momentum=0.9),
            named_parameters=net.named_parameters(),
            sparse_as_dense=True,
            node_shared=node_shared,
        )
        for step in range(STEPS):
            optimizer.zero_grad()
            net(torch.tensor([seat.rank, 5, step])).square().sum().backward()
            optimizer.step()
        rows: list[list[float]] = net.weight.tolist()
        return rows


@pytest.mark.long
def test_node_shared_parameters_take_sparse_gradients_as_dense_ones(ranks: Ranks) -> None:
    shared = on(ranks, 2, train_embedding, True)
    assert shared == on(ranks, 2, train_embedding, False)
    assert shared[0] == shared[1]


def options_out_of_range(seat: Seat, path: str, size: int) -> None:
    with job(seat, path, size) as hvd:
        plain = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=1.0)
        with pytest.raises(ValueError, match='strategy is "late"; use one of auto, overlap'):
            hvd.DistributedOptimizer(plain, strategy="late")
        with pytest.raises(ValueError, match="bucket_cap_mb is 0; give MiB above 0"):
            hvd.DistributedOptimizer(plain, bucket_cap_mb=0)
        with pytest.warns(DeprecationWarning, match="num_groups"):
            hvd.DistributedOptimizer(plain, num_groups=1)


def test_options_of_its_own_are_checked(ranks: Ranks) -> None:
    on(ranks, 1, options_out_of_range)


def test_the_type_of_strategies_names_those_that_there_are() -> None:
    from typing import get_args

    from hsgd.torch import optimizer
    from hsgd.torch.strategy_table import STRATEGIES, Strategy

    assert set(get_args(Strategy)) == {"auto", *optimizer._OVERLAP, *STRATEGIES}
