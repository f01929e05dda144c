"""What every contender has to deliver: the data, its batches, and the check of what was delivered."""

import ctypes
import dataclasses
import itertools
import mmap
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Batch = Mapping[str, Any]

LABEL: Final = "label"
GIB: Final = 1 << 30
#: The mapped file's share of the memory that is free.
_MAPPED_SHARE: Final = 0.55
_WRITE_BYTES: Final = 1 << 26


@dataclasses.dataclass(frozen=True)
class Workload:
    """Records, how they are kept, and the batches of them that are asked for.

    A record is one field of fixed shape, and ``label: int32``, which is its row.

    Attributes:
      name: as on the command line.
      data: name of the data; workloads may share it.
      num_records: records in the data.
      field: name of the field that is not the label.
      dtype: its dtype.
      shape: its shape in one record.
      batch_size: records in a batch; an epoch's last one may be shorter.
      stride: for windows, the elements from the begin of one to that of the next; 0 for records that
        lie side by side.
      mapped: whether the field is memory-mapped from a file, rather than read into memory.
      unit: batches that are delivered between two looks at the clock; ``None`` for an epoch.
      trains: whether a training step consumes each batch.
    """

    name: str
    data: str
    num_records: int
    field: str
    dtype: str
    shape: tuple[int, ...]
    batch_size: int
    stride: int = 0
    mapped: bool = False
    unit: int | None = None
    trains: bool = False

    @property
    def epoch_batches(self) -> int:
        """Batches in an epoch."""
        return -(-self.num_records // self.batch_size)

    @property
    def unit_batches(self) -> int:
        """Batches in a unit."""
        return self.epoch_batches if self.unit is None else min(self.unit, self.epoch_batches)

    @property
    def whole_epochs(self) -> bool:
        """Whether a unit is an epoch."""
        return self.unit_batches == self.epoch_batches

    @property
    def unit_records(self) -> int:
        """Records in a unit."""
        return min(self.unit_batches * self.batch_size, self.num_records)

    @property
    def record_bytes(self) -> int:
        """Bytes of a record's field, without its label."""
        return int(np.prod(self.shape)) * np.dtype(self.dtype).itemsize

    @property
    def data_bytes(self) -> int:
        """Bytes of the field, all records together."""
        if self.stride:
            return self._elements * np.dtype(self.dtype).itemsize
        return self.num_records * self.record_bytes

    @property
    def file_shape(self) -> tuple[int, ...]:
        """Shape of the array in the file."""
        return (self._elements,) if self.stride else (self.num_records, *self.shape)

    @property
    def _elements(self) -> int:
        return (self.num_records - 1) * self.stride + self.shape[0]


def workloads(*, quick: bool, mapped_gib: float, folder: Path) -> tuple[Workload, ...]:
    """The five workloads; ``quick`` makes all data tiny."""
    mapped = 2000 if quick else mapped_bytes(mapped_gib, folder) // 3072
    few = quick
    image = (224, 224, 3)
    big: dict[str, Any] = {"field": "image", "dtype": "uint8", "shape": (3072,), "batch_size": 256}
    return (
        Workload("records", "records", 2000 if few else 60_000, "image", "uint8", (784,), 256),
        Workload("mapped-warm", "mapped", mapped, **big, mapped=True, unit=200),
        Workload(
            "tokens", "tokens", 500 if few else 50_000, "tokens", "int32", (2048,), 64, 1531, True
        ),
        Workload("images", "images", 96 if few else 4000, "image", "uint8", image, 32, mapped=True),
        Workload("training", "training", 2048 if few else 59_904, **big, trains=True),
    )


def mapped_bytes(cap_gib: float, folder: Path) -> int:
    """Bytes for the mapped file: a bit more than half of free memory, if the cap and the disk allow."""
    disk = shutil.disk_usage(folder).free // 2
    return int(min(_MAPPED_SHARE * free_memory(), cap_gib * GIB, disk))


def free_memory() -> int:
    """Bytes of memory that a program could get, page cache included."""
    info = Path("/proc/meminfo")
    for line in info.read_text("utf-8").splitlines() if info.exists() else ():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


# --- the data -------------------------------------------------------------------------------------


def make_data(workload: Workload, folder: Path) -> None:
    """Writes the data's two ``.npy`` files, random and the same each time, and syncs them to disk."""
    generator, dtype = np.random.default_rng(0), np.dtype(workload.dtype)
    shape = workload.file_shape
    header = {"descr": dtype.str, "fortran_order": False, "shape": shape}
    left = int(np.prod(shape)) * dtype.itemsize
    with _field_path(workload, folder).open("wb") as file:
        np.lib.format.write_array_header_1_0(file, header)
        while left:
            part = min(left, _WRITE_BYTES)
            file.write(generator.bytes(part))
            left -= part
        file.flush()
        os.fsync(file.fileno())
    np.save(_label_path(folder), np.arange(workload.num_records, dtype=np.int32))


def _field_path(workload: Workload, folder: Path) -> Path:
    return folder / f"{workload.field}.npy"


def _label_path(folder: Path) -> Path:
    return folder / f"{LABEL}.npy"


class Data:
    """A workload's records. Another process that it is sent to opens the files itself."""

    def __init__(self, workload: Workload, folder: Path) -> None:
        self.workload, self.folder = workload, folder
        self.flat: Array = np.load(
            _field_path(workload, folder), mmap_mode="r" if workload.mapped else None
        )
        field = np.asarray(self.flat)
        if workload.stride:
            windows = np.lib.stride_tricks.sliding_window_view(field, workload.shape)
            field = windows[:: workload.stride]
        #: For each field's name an array ``[n, ...]``; windows are a view that copies nothing.
        self.arrays: dict[str, Array] = {
            workload.field: field,
            LABEL: np.load(_label_path(folder)),
        }

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.workload, self.folder)

    def __len__(self) -> int:
        return self.workload.num_records

    def read(self, rows: Any) -> dict[str, Array]:
        """The records of ``rows``, whichever sequence they are: each field as a fresh array."""
        if self.workload.stride:  # np.take would copy all windows first
            return {name: array[rows] for name, array in self.arrays.items()}
        return {name: np.take(array, rows, axis=0) for name, array in self.arrays.items()}

    def record(self, row: int) -> dict[str, Any]:
        """One record."""
        return {name: array[row] for name, array in self.arrays.items()}


# --- the page cache -------------------------------------------------------------------------------


def read_through(workload: Workload, folder: Path) -> None:
    """Reads the field's file once, so that as much of it as fits is in memory."""
    with _field_path(workload, folder).open("rb", buffering=0) as file:
        while file.read(_WRITE_BYTES):
            pass


def resident_share(workload: Workload, folder: Path) -> float | None:
    """Share of the field's file that is in memory, from 0 to 1; ``None`` where nobody tells."""
    mincore = getattr(ctypes.CDLL(None, use_errno=True), "mincore", None)
    if mincore is None:
        return None
    with (
        _field_path(workload, folder).open("rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped,
    ):
        pages = np.zeros(-(-len(mapped) // mmap.PAGESIZE), np.uint8)
        view = np.frombuffer(mapped, np.uint8)
        address = ctypes.c_void_p(view.ctypes.data)
        failed = mincore(
            address, ctypes.c_size_t(len(mapped)), pages.ctypes.data_as(ctypes.c_void_p)
        )
        del view
    return None if failed else float((pages & 1).mean())


def file_system(folder: Path) -> str:
    """Type and device of the file system that a folder is on, where the system tells it."""
    mounts = Path("/proc/mounts")
    lines = mounts.read_text("utf-8").splitlines() if mounts.exists() else []
    found = [(where, f"{kind} on {device}") for device, where, kind, *_ in map(str.split, lines)]
    fitting = [
        (len(where), text) for where, text in found if folder.resolve().is_relative_to(where)
    ]
    return max(fitting)[1] if fitting else "a file system of unknown type"


# --- the check ------------------------------------------------------------------------------------


def check(batches: Iterator[Batch], data: Data) -> list[str]:
    """Consumes a unit; says in what it is not the data's: shapes, records, or how often they come."""
    workload = data.workload
    faults: dict[str, None] = {}
    sizes, labels = [], []
    for batch in itertools.islice(batches, workload.unit_batches):
        got = {name: np.asarray(batch[name]) for name in data.arrays}
        sizes.append(len(got[LABEL]))
        labels.append(got[LABEL])
        faults |= dict.fromkeys(_batch_faults(got, data))
    rows = np.concatenate(labels)
    full, left = divmod(workload.unit_records, workload.batch_size)
    if sizes != [workload.batch_size] * full + ([left] if left else []):
        faults["batches of other sizes"] = None
    if len(np.unique(rows)) != len(rows) or len(rows) != workload.unit_records:
        faults["not each record once"] = None
    if np.array_equal(rows, np.sort(rows)):
        faults["not shuffled"] = None
    return list(faults)


def _batch_faults(got: Mapping[str, Array], data: Data) -> Iterator[str]:
    rows = got[LABEL]
    if rows.dtype.kind not in "iu" or not np.all((rows >= 0) & (rows < len(data))):
        yield f"labels that no record has ({rows.dtype})"
        return
    wanted = data.read(rows.astype(np.int64))
    for name, array in wanted.items():
        other = got[name]
        if (other.dtype, other.shape) != (array.dtype, array.shape):
            yield f"{name} is {other.dtype}{list(other.shape)}, not {array.dtype}{list(array.shape)}"
        elif not np.array_equal(other, array):
            yield f"a record's {name} is not that of its label"
