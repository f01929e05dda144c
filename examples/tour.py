# %% [markdown]
# # Eleven records in batches of four
# As a script, `python examples/tour.py`; as a notebook in VS Code, or with jupytext in Jupyter.
# Below each cell stands what it prints. First guess: what becomes of the last three records?
# %%
import tempfile
from dataclasses import replace

import numpy as np

import checkpointing
import loader

ids = np.arange(11)
x = (ids / 10).astype(np.float32)
y = 2 * x - 1
source = loader.ArraySource({"x": x, "y": y}, ids=ids)
config = loader.PipelineConfig(4, 17, "partial", num_epochs=2, shuffle="permutation")
pipeline = loader.Pipeline(source, config)
# %%
# Order is a function of seed and epoch: the same each time, another one in each epoch.
print([pipeline.ids(step).tolist() for step in range(6)])
# -> [[9, 10, 4, 1], [0, 7, 6, 8], [2, 5, 3], [4, 0, 5, 10], [6, 2, 1, 9], [7, 3, 8]]
# %%
# Position is what it takes to go on from anywhere: epoch, records of it that have come, batches.
print(pipeline.position(4), next(pipeline.iterate(pipeline.position(4)))["id"])
# -> Position(epoch=1, offset=4, step=4) [6 2 1 9]
# %%
# The final batch may be short, may be left out, or may have slots that hold no record.
drop, pad = (loader.Pipeline(source, replace(config, final_batch=how)) for how in ("drop", "pad"))
print(pipeline[2]["id"], drop.omitted_ids(epoch=0), pad[2]["id"], pad[2]["mask"])
# -> [2 5 3] [2 3 5] [ 2  5  3 -1] [ True  True  True False]
# %%
# A mean over slots is not the mean of the records; the mask makes it one.
print(pad[2]["y"].mean(), loader.masked_mean(pad[2]["y"], pad[2]["mask"]), pipeline[2]["y"].mean())
# -> -0.25 -0.33333334 -0.33333334
# %%
# Resume: state and position are saved together; stopped within an epoch, a run ends the same.
folder = tempfile.TemporaryDirectory()


def train(name: str, stop: int, data: loader.ArraySource = source) -> float:
    stream = loader.Pipeline(data, config)
    with checkpointing.Checkpoints(f"{folder.name}/{name}", stream, save_every=1, keep=3) as saved:
        run = saved.resume(0.0)
        slope = run.train_state
        while run.batches.position.step < stop:
            batch = next(run.batches)
            slope -= float(np.mean((slope * batch["x"] - 1 - batch["y"]) * batch["x"]))
            saved.save(run.batches, slope)
        return slope


print(train("whole", stop=6), train("stopped", stop=4), train("stopped", stop=6))
# -> 1.8522122353315353 1.6416107788681984 1.8522122353315353
# %%
# Fingerprint: a copy is the same data; reordered, or with one label edited, it is another.
edited = np.where(ids == 7, y + 1, y)
pairs = (x, y), (x.copy(), y.copy()), (x[::-1], y[::-1]), (x, edited)
print([loader.dataset_digest(*pair)[:8] for pair in pairs])
# -> ['1a81451a', '1a81451a', 'b7f9310b', '7f8f2b83']
# %%
# Refusal: the position belongs to these records; with another label, nothing is restored.
try:
    train("stopped", stop=6, data=loader.ArraySource({"x": x, "y": edited}, ids=ids))
except checkpointing.CheckpointMismatchError as error:
    print(str(error).splitlines()[1].strip())
# -> dataset.y  checkpoint sha256:1a53b9094ef4...  now sha256:1f7495f8a0e9...  (1 of 11 records differs: id 7)
# %%
# Audit: eleven is no proof that each came once, nor a shape that each y belongs to its x.
mixed_up = [{**batch, "y": batch["y"][::-1]} for batch in pipeline]
print(loader.audit(pipeline).found, loader.audit_batches(mixed_up, source, config).found)
# -> () ('alignment',)
# %%
# Provenance, from the run's directory: what step 4 held, and at which steps and slots 7 came.
history = checkpointing.provenance(f"{folder.name}/stopped")
print(history.records_at(4).ids, [(visit.step, visit.slot) for visit in history.steps_of(7)])
# -> [6 2 1 9] [(1, 1), (5, 0)]
folder.cleanup()
