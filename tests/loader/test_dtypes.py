"""Every dtype of NumPy and ml_dtypes, in both byte orders: bytes and dtype come back from each format, or it refuses."""

import contextlib
from pathlib import Path
from typing import Any, Final

import jax
import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

import loader
from loader.reading.devices import to_device
from loader.sources.protocol import is_extended
from regrain.cli import convert_formats

N: Final = 6
OF_ML_DTYPES: Final = [
    np.dtype(kind)
    for kind in vars(ml_dtypes).values()
    if isinstance(kind, type) and issubclass(kind, np.generic)
]
OF_NUMPY: Final = [np.dtype(code) for code in "?bBhHiIqQefdgFDG"]
NATIVE: Final = OF_NUMPY + OF_ML_DTYPES
SWAPPED: Final = [dtype.newbyteorder() for dtype in NATIVE if dtype.newbyteorder() != dtype]
TIMES: Final = [np.dtype(name) for name in ("M8[D]", "M8[s]", ">M8[ns]", "m8[ms]", "M8[10ms]")]
TEXTS: Final = [np.dtype(name) for name in ("U2", ">U2", "S2")]
NAMELESS: Final = [dtype for dtype in SWAPPED if is_extended(dtype)]
KEPT: Final = [dtype for dtype in NATIVE + SWAPPED if dtype not in NAMELESS]
IN_PARQUET: Final = [dtype for dtype in OF_NUMPY if dtype.char in "?bBhHiIqQefd"] + [
    *TEXTS,
    *(np.dtype(name) for name in ("m8[ms]",)),
]
REFUSED: Final = [
    *NAMELESS,
    np.dtype("V2"),
    np.dtype([("a", "i4"), ("b", ml_dtypes.bfloat16)]),
    np.dtype([("a", "i4"), ("b", [("c", ml_dtypes.float8_e5m2, (2,))])]),
    np.dtype([("a", "V2")]),
]


def array_of(dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """Records of two values; 0 and 1 are there in every dtype."""
    ones = np.arange(2 * N).reshape(N, 2) % 2
    return ones.astype(dtype.newbyteorder("=")).astype(dtype)


def source_of(array: npt.NDArray[Any]) -> loader.ArraySource:
    return loader.ArraySource({"x": array})


def assert_same(found: Any, array: npt.NDArray[Any]) -> None:
    assert (found.dtype, found.shape) == (array.dtype, array.shape)
    assert found.dtype.byteorder == array.dtype.byteorder
    assert found.tobytes() == array.tobytes()


def names(dtype: np.dtype[Any]) -> str:
    name = dtype.type.__name__ if is_extended(dtype) else str(dtype)
    return f"{name}{'' if dtype.isnative else ' swapped'}"


def test_ml_dtypes_are_all_here() -> None:
    assert {"bfloat16", "int2", "uint4", "float4_e2m1fn", "float8_e5m2"} <= set(map(str, NATIVE))
    assert len(SWAPPED) > len(OF_ML_DTYPES)


@pytest.mark.parametrize("dtype", KEPT + TIMES + TEXTS, ids=names)
def test_a_batch_and_its_fingerprint_keep_the_dtype(dtype: np.dtype[Any]) -> None:
    array = array_of(dtype)
    source = source_of(array)
    config = loader.PipelineConfig(N, seed=0, final_batch="drop", shuffle="none")
    assert_same(loader.Pipeline(source, config)[0]["x"], array)
    assert source.fingerprint().columns["x"].dtype == str(dtype)


@pytest.mark.parametrize("format_name", ["npy", "array_record", "parquet"])
@pytest.mark.parametrize("dtype", KEPT + TIMES + TEXTS, ids=names)
def test_a_format_keeps_the_dtype_or_refuses_it(
    tmp_path: Path, format_name: convert_formats.Name, dtype: np.dtype[Any]
) -> None:
    array, path = array_of(dtype), tmp_path / "data"
    source = source_of(array)
    form = convert_formats.FORMATS[format_name]
    if format_name == "parquet" and dtype not in IN_PARQUET:
        with pytest.raises(TypeError, match=r"Parquet has .* field 'x'"):
            form.write(source, path)
        assert not path.exists()
    else:
        form.write(source, path)
        assert_same(form.read(path, source).read(np.arange(N))["x"], array)


@pytest.mark.parametrize("dtype", KEPT + TIMES + TEXTS, ids=names)
def test_a_file_of_numpys_keeps_the_dtype_that_is_named(
    tmp_path: Path, dtype: np.dtype[Any]
) -> None:
    array = array_of(dtype)
    np.save(tmp_path / "x.npy", array)
    try:
        np.load(tmp_path / "x.npy")
    except ValueError:  # NumPy itself cannot read what it has written
        assert is_extended(dtype)
        with pytest.raises(ValueError, match=r"file x\.npy cannot be read as \.npy"):
            loader.NpySource(tmp_path, fields={"x": dtype})
        return
    if is_extended(dtype):
        with pytest.raises(TypeError, match=r"file x\.npy holds raw bytes, \|V\d, .*fields="):
            loader.NpySource(tmp_path)
    source = loader.NpySource(tmp_path, fields={"x": dtype})
    assert_same(source.read(np.arange(N))["x"], array)
    again = loader.NpySource(tmp_path, fields={"x": (dtype, (2,))})
    assert again.fingerprint() == source.fingerprint()
    assert again.fingerprint().columns["x"].dtype == str(dtype)


def test_a_described_folder_names_its_dtypes_itself(tmp_path: Path) -> None:
    loader.write_npy(source_of(array_of(np.dtype(ml_dtypes.int4))), tmp_path / "data")
    with pytest.raises(ValueError, match=r"fields names dtypes for 'x', and regrain\.json"):
        loader.NpySource(tmp_path / "data", fields={"x": ml_dtypes.uint4})


def test_a_dtype_of_another_size_is_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", array_of(np.dtype(ml_dtypes.bfloat16)))
    with pytest.raises(ValueError, match=r"file x\.npy holds records \|V2\[2\], and .*float8"):
        loader.NpySource(tmp_path, fields={"x": ml_dtypes.float8_e4m3})


@pytest.mark.parametrize("dtype", REFUSED, ids=names)
def test_a_dtype_without_a_name_is_refused_at_the_door(
    tmp_path: Path, dtype: np.dtype[Any]
) -> None:
    array = np.zeros((N, 2), dtype)
    with pytest.raises(TypeError, match=r"field 'x'.* has "):
        source_of(array)
    with pytest.raises(TypeError, match=r"field 'x'.* has "):
        loader.encode_record({"x": array[0]})
    np.savez(tmp_path / "a.npz", x=array)
    with pytest.raises((TypeError, ValueError), match=r"field 'x'.* has |(no|a) \.npz file"):
        convert_formats.opened(tmp_path / "a.npz")


def test_workers_send_every_dtype() -> None:
    arrays = {str(number): array_of(dtype) for number, dtype in enumerate(KEPT + TIMES + TEXTS)}
    config = loader.PipelineConfig(N, seed=0, final_batch="drop", shuffle="none")
    pipeline = loader.Pipeline(loader.ArraySource(arrays), config)
    with contextlib.closing(pipeline.iterate(workers=1)) as batches:
        batch = next(batches)
        for name, array in arrays.items():
            assert_same(batch[name], array)


@pytest.mark.parametrize("dtype", KEPT, ids=names)
def test_a_device_gets_the_values_or_refuses_the_field(dtype: np.dtype[Any]) -> None:
    config = loader.PipelineConfig(N, seed=0, final_batch="drop", shuffle="none")
    pipeline, device = loader.Pipeline(source_of(array_of(dtype)), config), jax.devices("cpu")[0]
    try:
        jax.device_put(np.zeros(1, dtype.newbyteorder("=")))
    except (TypeError, RuntimeError):
        for refused in (
            lambda: pipeline.iterate(device=device),
            lambda: to_device(pipeline[0], device),
        ):
            with pytest.raises(TypeError, match=r"field 'x' has dtype .*JAX .* has no arrays"):
                refused()
        return
    with contextlib.closing(pipeline.iterate(device=device)) as batches:
        found = next(batches)["x"]
    assert isinstance(found, jax.Array)
    in_bits_of_jax = jax.dtypes.canonicalize_dtype(dtype.newbyteorder("="))
    assert_same(np.asarray(found), array_of(in_bits_of_jax))


def test_a_mixture_refuses_a_field_for_a_device_at_once() -> None:
    config = loader.PipelineConfig(N, seed=0, final_batch="drop", num_epochs=None)
    parts = {
        name: loader.Pipeline(source_of(array_of(np.dtype(np.longdouble))), config) for name in "ab"
    }
    mixture = loader.Mixture(parts, {"a": 1, "b": 1})
    with pytest.raises(TypeError, match=r"field 'x' has dtype .*JAX .* has no arrays"):
        mixture.iterate(device=jax.devices("cpu")[0])
