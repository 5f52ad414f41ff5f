"""Python's and the core's readers of HSGD_* agree on names, defaults, bounds and words."""

from __future__ import annotations

import ctypes
import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import hsgd
from hsgd import _native
from hsgd.comm.native_options import _STORES, _WIRE_DTYPES, native_options
from hsgd.config import Config

__all__: list[str] = []

ROOT = Path(__file__).resolve().parents[2]
PYTHON_ONLY = {
    "abort_after_s",
    "as_gloo",
    "as_horovod",
    "check_replicas",
    "overlap",
    "ports",
    "preempt_signals",
    "interfaces",
    "step_dir",
    "cuda_library",
    "nccl_library",
    "device_chunk_bytes",
    "dump",
    "dump_dir",
    "debug",
    "cache_dir",
}
SHARED = {f: v for f, v in Config.variables().items() if f not in PYTHON_ONLY}
WORDS = {"HSGD_STORE": _STORES, "HSGD_WIRE_DTYPE": _WIRE_DTYPES}
NUMBERS = sorted(set(SHARED.values()) - set(WORDS))


class NativeOptions(ctypes.Structure):
    """hsgd_options of csrc/include/hsgd_core.h."""

    _fields_ = (
        ("struct_bytes", ctypes.c_uint32),
        ("nontemporal", ctypes.c_uint32),
        ("timeout_s", ctypes.c_double),
        ("oneshot_bytes", ctypes.c_int64),
        ("chunk_bytes", ctypes.c_int64),
        ("wire_oneshot_bytes", ctypes.c_uint64),
        ("wire_chunk_bytes", ctypes.c_uint64),
        ("slots", ctypes.c_uint32),
        ("spin", ctypes.c_int32),
        ("min_bytes", ctypes.c_uint64),
        ("report", ctypes.c_uint32),
        ("wire_dtype", ctypes.c_uint32),
        ("wire_radix", ctypes.c_uint32),
        ("flat_ranks", ctypes.c_uint32),
        ("near_nic", ctypes.c_int32),
        ("interrupted", ctypes.c_void_p),
        ("timeout_given", ctypes.c_uint32),
        ("late", ctypes.c_void_p),
        ("progress", ctypes.c_void_p),
        ("known_store", ctypes.c_uint32),
        ("known_allreduce_bytes", ctypes.c_uint64),
        ("process", ctypes.c_void_p),
        ("comm_id", ctypes.c_uint64),
        ("rank_names", ctypes.c_void_p),
    )


class NativeError(ctypes.Structure):
    """hsgd_error of csrc/include/hsgd_core.h."""

    _fields_ = (
        ("code", ctypes.c_int32),
        ("rank", ctypes.c_int32),
        ("message", ctypes.c_char * 1024),
    )


def read_natively() -> tuple[NativeOptions, str]:
    """What the core makes of the environment: the options, or the line that refuses one."""
    core = ctypes.CDLL(str(Path(hsgd.__file__).with_name("libhsgd_core.so")))
    options, error = NativeOptions(), NativeError()
    status = core.hsgd_options_from_env(ctypes.byref(options), ctypes.byref(error))
    assert (status == 0) == (error.message == b"")
    assert options.struct_bytes == ctypes.sizeof(NativeOptions)
    return options, error.message.decode()


def read_by_both() -> tuple[dict[str, Any] | str, dict[str, Any] | str]:
    """The same from Config and from the core: values by field, or the line that refuses one."""
    options, refusal = read_natively()
    native: dict[str, Any] | str = refusal
    if not refusal:
        native = {f: getattr(options, "nontemporal" if f == "store" else f) for f in SHARED}
    try:
        config = Config.from_env()
    except ValueError as error:
        return str(error), native
    values = {field: getattr(config, field) for field in SHARED}
    values["store"] = _STORES[config.store]
    values["wire_dtype"] = _WIRE_DTYPES[config.wire_dtype]
    return values, native


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in Config.variables().values():
        monkeypatch.delenv(variable, raising=False)


def test_an_empty_environment_gives_the_same_defaults_everywhere() -> None:
    values, native = read_by_both()
    assert values == native
    defaults, passed = _native.Options(), native_options(Config())
    for field in SHARED:
        name = "nontemporal" if field == "store" else field
        assert (
            getattr(defaults, name)
            == getattr(passed, name)
            == native[name if name in native else field]
        )  # type: ignore[index]


def test_the_core_reads_exactly_the_variables_that_have_a_field() -> None:
    source = (ROOT / "hsgd/csrc/core/base/options.cpp").read_text()
    assert set(re.findall(r'"(HSGD_\w+)"', source)) == set(SHARED.values())


def test_every_variable_is_on_the_configuration_page_with_its_default() -> None:
    page = (ROOT / "docs/configuration.md").read_text()
    rows = dict(re.findall(r"^\| `(HSGD_\w+)` \| ([^|]+) \|", page, re.MULTILINE))
    assert set(rows) == set(Config.variables().values())
    for field in dataclasses.fields(Config):
        if field.name not in ("cache_dir", "dump_dir", "step_dir"):
            shown = (
                int(field.default) if isinstance(field.default, (bool, float)) else field.default
            )
            assert rows[field.metadata["variable"]] == str(shown)


def test_an_empty_value_counts_as_unset(monkeypatch: pytest.MonkeyPatch) -> None:
    unset = read_by_both()
    for variable in Config.variables().values():
        monkeypatch.setenv(variable, "")
    assert read_by_both() == unset


ODD = [
    *("0", "1", "-1", "2", "3", "64", "65", "4095", "4096", "1048576", "1048577", "268435456"),
    *("268435457", "1000000000", "1000000001", "1000000000000000", "1000000000000001", "1e9"),
    *("1e15", "0.001", "0.0009", "1.5", "5.", ".5", "1e3", "1e400", "1e-400", "inf", "nan", "-0"),
    *(
        "+7",
        "++7",
        "7-",
        "0x10",
        "0x1p4",
        "1_000",
        " 5",
        "5 ",
        " ",
        "٥",
        "5,0",
        "5\t",
        "e",
        ".",
        "-",
    ),
    *("true", "yes", "12abc", "99999999999999999999999", "007", "1e", "1e+", "infinity", "1.0.0"),
]


@pytest.mark.parametrize("variable", NUMBERS)
def test_both_readers_take_and_refuse_the_same_numbers(
    variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for text in ODD:
        monkeypatch.setenv(variable, text)
        values, native = read_by_both()
        assert values == native, f"{variable}={text!r}"
        assert isinstance(values, dict) or values.startswith(f"{variable}={text}: expected ")


@settings(
    derandomize=True,
    database=None,
    max_examples=500,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(variable=st.sampled_from(NUMBERS), text=st.text("0123456789+-.eExXinfa_ ,", max_size=8))
@example(variable="HSGD_SLOTS", text="4")
def test_both_readers_agree_on_any_text(
    variable: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as environment:
        environment.setenv(variable, text)
        values, native = read_by_both()
    assert values == native


@pytest.mark.parametrize("variable", WORDS)
@pytest.mark.parametrize("kind", ["taken", "refused"])
def test_both_readers_take_and_refuse_the_same_words(
    variable: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = ["Auto", "2", " auto", "x", "NONE", "bf16", "float32", "none "]
    for text in WORDS[variable] if kind == "taken" else refused:
        monkeypatch.setenv(variable, text)
        values, native = read_by_both()
        assert values == native, text
        assert isinstance(values, dict) == (kind == "taken"), text


OUT_OF_BOUNDS: list[dict[str, Any]] = [
    {"timeout_s": 0.0},
    {"timeout_s": float("nan")},
    {"timeout_s": 1e30},
    {"slots": 2},
    {"slots": 65},
    {"slots": 4.5},
    {"slots": "many"},
    {"chunk_bytes": -2},
    {"chunk_bytes": 1 << 62},
    {"oneshot_bytes": 1 << 40},
    {"spin": -2},
    {"store": "fast"},
    {"wire_dtype": "bf16"},
    {"overlap": True},
    {"check_replicas": "2"},
    {"slots": "5"},
    {"timeout_s": "1800.0"},
    {"wire_oneshot_bytes": 1 << 40},
    {"wire_chunk_bytes": -1},
    {"wire_radix": 1},
    {"flat_ranks": 0},
    {"min_bytes": None},
    {"report": 2},
]


@pytest.mark.parametrize("values", OUT_OF_BOUNDS, ids=str)
def test_a_program_may_set_no_more_than_the_environment(values: dict[str, Any]) -> None:
    (field,) = values
    with pytest.raises(ValueError, match=f"^Config.{field}=.*: expected ") as caught:
        Config(**values)
    assert "\n" not in str(caught.value)


def test_values_within_the_bounds_are_kept_as_they_are() -> None:
    given_values = {"timeout_s": 2, "slots": 64, "report": True, "cache_dir": "/tmp/x", "spin": 0}
    config = Config(**given_values)  # type: ignore[arg-type]
    assert {name: getattr(config, name) for name in given_values} == given_values
