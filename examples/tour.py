# %% [markdown]
# # Eleven records in batches of four
# As a script, `python examples/tour.py`; as a notebook in VS Code, or with jupytext in Jupyter.
# Each cell ends with its output. First guess: what happens to the last three records?
# %%
import tempfile
from dataclasses import replace

import numpy as np

import regrain

ids = np.arange(11)
x = (ids / 10).astype(np.float32)
y = 2 * x - 1
source = regrain.ArraySource({"x": x, "y": y}, ids=ids)
config = regrain.PipelineConfig(4, 17, "partial", num_epochs=2, shuffle="permutation")
pipeline = regrain.Pipeline(source, config)
# %%
# The order depends on seed and epoch only: equal each time, different in each epoch.
print([pipeline.ids(step).tolist() for step in range(6)])
# -> [[9, 10, 4, 1], [0, 7, 6, 8], [2, 5, 3], [4, 0, 5, 10], [6, 2, 1, 9], [7, 3, 8]]
# %%
# A position is all that a resume needs: epoch, records of it delivered, batches delivered.
print(pipeline.position(4), next(pipeline.iterate(pipeline.position(4)))["id"])
# -> Position(epoch=1, offset=4, step=4) [6 2 1 9]
# %%
# The final batch may be short, left out, or padded with empty slots.
drop, pad = (regrain.Pipeline(source, replace(config, final_batch=how)) for how in ("drop", "pad"))
print(pipeline[2]["id"], drop.omitted_ids(epoch=0), pad[2]["id"], pad[2]["mask"])
# -> [2 5 3] [2 3 5] [ 2  5  3 -1] [ True  True  True False]
# %%
# A mean over slots is not the mean of the records; a masked mean is.
print(pad[2]["y"].mean(), regrain.masked_mean(pad[2]["y"], pad[2]["mask"]), pipeline[2]["y"].mean())
# -> -0.25 -0.33333334 -0.33333334
# %%
# Resume: state and position are saved together; a run stopped within an epoch ends the same.
folder = tempfile.TemporaryDirectory()


def train(name: str, stop: int, data: regrain.ArraySource = source) -> float:
    stream = regrain.Pipeline(data, config)
    with regrain.Checkpoints(f"{folder.name}/{name}", stream, save_every=1, keep=3) as saved:
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
# Fingerprint: a copy is the same data; a reordered or edited copy is not.
edited = np.where(ids == 7, y + 1, y)
pairs = (x, y), (x.copy(), y.copy()), (x[::-1], y[::-1]), (x, edited)
print([regrain.dataset_digest(*pair)[:8] for pair in pairs])
# -> ['1a81451a', '1a81451a', 'b7f9310b', '7f8f2b83']
# %%
# Refusal: with one label edited, nothing is restored.
try:
    train("stopped", stop=6, data=regrain.ArraySource({"x": x, "y": edited}, ids=ids))
except regrain.CheckpointMismatchError as error:
    print(str(error).splitlines()[1].strip())
# -> dataset.y  checkpoint sha256:1a53b9094ef4...  now sha256:1f7495f8a0e9...  (1 of 11 records differs: id 7)
# %%
# Audit: a count does not prove that each record came once, nor a shape that y belongs to x.
mixed_up = [{**batch, "y": batch["y"][::-1]} for batch in pipeline]
print(regrain.audit(pipeline).found, regrain.audit_batches(mixed_up, source, config).found)
# -> () ('alignment',)
# %%
# Provenance, from the run's directory: the records of step 4, and the steps and slots of record 7.
history = regrain.provenance(f"{folder.name}/stopped")
print(history.records_at(4).ids, [(visit.step, visit.slot) for visit in history.steps_of(7)])
# -> [6 2 1 9] [(1, 1), (5, 0)]
folder.cleanup()
