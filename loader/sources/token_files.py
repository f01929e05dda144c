"""Where the tokens of a file begin, and their dtype: flat files, ``.npy`` files, and files of llm.c."""

import dataclasses
import io
import pathlib
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from loader.sources.files import FileSet

DTYPES: Final = ("uint8", "uint16", "uint32")

_NPY: Final = np.lib.format.MAGIC_PREFIX
_NPY_HEADER_BYTES: Final = 1 << 16
_LLMC_HEADER_BYTES: Final = 1024
#: By llm.c's magic number and version, the dtype of the tokens.
_LLMC: Final = {(20240520, 1): "uint16", (20240801, 7): "uint32"}
_LLMC_MAGICS: Final = {magic for magic, _ in _LLMC}
_LLMC_EVAL: Final = 20240522
#: How files of other formats begin.
_OTHERS: Final = {
    b"PK\x03\x04": "a zip archive, as .npz and PyTorch files are",
    b"PAR1": "a Parquet file",
    b"ARROW1": "an Arrow file",
    b"MMIDIDX\0": "an index of Megatron-LM",
    b"\x1f\x8b\x08": "compressed by gzip",
    b"\x28\xb5\x2f\xfd": "compressed by zstd",
    b"\xfd7zXZ\0": "compressed by xz",
    b"BZh": "compressed by bzip2",
    b"\x89HDF\r\n": "an HDF5 file",
    b"Obj\x01": "an Avro file",
    b"SQLite format 3": "an SQLite database",
}
_FLAT: Final = "If it is flat tokens nevertheless, give header_bytes=0"


@dataclasses.dataclass(frozen=True)
class TokenFile:
    """Where a file's tokens are.

    Attributes:
      dtype: of a token, with its byte order.
      start: the byte at which the first token begins.
      length: the number of tokens.
    """

    dtype: np.dtype[Any]
    start: int
    length: int


def token_files(files: FileSet, dtype: str | None, header_bytes: int | None) -> list[TokenFile]:
    """Find where the tokens of each file are.

    Args:
      files: the files.
      dtype: of the tokens; by default the one that a file's header names, and uint16 without a header.
      header_bytes: bytes before the first token of each file; by default the header is recognised.

    Raises:
      OSError: a file cannot be read.
      ValueError: a file is not a whole number of tokens, is of another format, or has another dtype
        than ``dtype`` or than the first file; names it.
    """
    found = [_token_file(files, number, dtype, header_bytes) for number in range(len(files))]
    for name, one in zip(files.names, found, strict=True):
        if one.dtype != found[0].dtype:
            raise ValueError(
                f"file {name} holds {_text(one.dtype)}, and file {files.names[0]} "
                f"{_text(found[0].dtype)}: all files of a source must have one dtype; open them as two sources, or "
                "convert one"
            )
    return found


def _token_file(
    files: FileSet, number: int, dtype: str | None, header_bytes: int | None
) -> TokenFile:
    name, size = files.names[number], files.states[number].size
    if header_bytes is not None:
        return _flat(name, size, dtype or "uint16", header_bytes)
    with pathlib.Path(files.path(number)).open("rb") as file:
        files.check(number, fd=file.fileno())
        start = file.read(_LLMC_HEADER_BYTES)
        if start.startswith(_NPY):
            found = _npy(name, size, start + file.read(_NPY_HEADER_BYTES))
            return _as_asked(name, found, dtype)
    if name.endswith(".npy"):
        raise ValueError(
            f"file {name} begins with {start[:6]!r}, and a .npy file with {_NPY!r}: it is cut or damaged. "
            f"{_FLAT}"
        )
    for magic, what in _OTHERS.items():
        if start.startswith(magic):
            raise ValueError(
                f"file {name} begins with {magic!r}: it is {what}, not flat tokens. Write its tokens to a "
                f".npy file, or flat. {_FLAT}"
            )
    if len(start) == _LLMC_HEADER_BYTES:
        header = np.frombuffer(start, "<i4", 3).tolist()
        if header[0] == _LLMC_EVAL or header[0] in _LLMC_MAGICS:
            return _as_asked(name, _llmc(name, size, header), dtype)
    return _flat(name, size, dtype or "uint16", 0)


def _flat(name: str, size: int, dtype: str, start: int) -> TokenFile:
    found = np.dtype(dtype).newbyteorder("<")
    length, rest = divmod(size - start, found.itemsize)
    after = f" after {start} of header" if start else ""
    if length < 1:
        raise ValueError(f"file {name} holds {size} bytes, and no token of {dtype}{after}")
    if rest:
        raise ValueError(
            f"file {name} holds {size} bytes, and a token of {dtype} has {found.itemsize}: there are {rest} "
            f"too many after byte {size - rest}. The file is cut, has a header (header_bytes), or another dtype"
        )
    return TokenFile(found, start, length)


def _npy(name: str, size: int, start: bytes) -> TokenFile:
    file = io.BytesIO(start)
    try:
        version = np.lib.format.read_magic(file)
        read = {
            (1, 0): np.lib.format.read_array_header_1_0,
            (2, 0): np.lib.format.read_array_header_2_0,
        }[version]
        shape, _, dtype = read(file)
    except Exception as error:  # a damaged header has Python's parsers raise all kinds of them
        why = str(error).partition("\n")[0][:200]
        raise ValueError(f"file {name} cannot be read as .npy: {why}") from error
    if len(shape) != 1 or dtype.newbyteorder("=").name not in DTYPES:
        raise ValueError(
            f"file {name} is an array {dtype}{list(shape)}, and tokens must have one axis and be "
            f"{', '.join(DTYPES)}; save numpy.load(file).ravel().astype('uint32')"
        )
    needed = file.tell() + shape[0] * dtype.itemsize
    if size != needed or not shape[0]:
        raise ValueError(
            f"file {name} holds {size} bytes, and its header describes {needed} with {shape[0]} tokens; the "
            "file is cut or damaged, or holds no token"
        )
    return TokenFile(dtype, file.tell(), shape[0])


def _llmc(name: str, size: int, header: Sequence[int]) -> TokenFile:
    magic, version, length = header
    dtype = _LLMC.get((magic, version))
    if dtype is None:
        raise ValueError(
            f"file {name} has llm.c's header, with magic number {magic} and version {version}; known for tokens "
            f"are {', '.join(f'{one} and {other}' for one, other in _LLMC)}. {_FLAT}"
        )
    found = np.dtype(dtype).newbyteorder("<")
    needed = _LLMC_HEADER_BYTES + length * found.itemsize
    if length < 1 or size != needed:
        raise ValueError(
            f"file {name} holds {size} bytes, and its header, that of llm.c, describes {length} tokens of "
            f"{dtype}, {needed} bytes; the file is cut or damaged. {_FLAT}"
        )
    return TokenFile(found, _LLMC_HEADER_BYTES, length)


def _as_asked(name: str, found: TokenFile, dtype: str | None) -> TokenFile:
    if dtype is not None and found.dtype.newbyteorder("=") != np.dtype(dtype):
        raise ValueError(
            f"file {name} holds {_text(found.dtype)}, as its header says, and dtype is {dtype!r}; "
            "leave dtype out"
        )
    return found


def _text(dtype: np.dtype[Any]) -> str:
    return dtype.name if dtype.isnative else f"{dtype.name} (big-endian)"
