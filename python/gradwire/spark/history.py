"""The history of a training: a pandas frame, and its figures."""

from __future__ import annotations

from os import PathLike

import pandas as pd

__all__ = ["History"]


class History(pd.DataFrame):
    """One row per epoch, or per epoch and worker with ``collect_stats=True``.

    Columns: ``epoch``, ``loss``, ``validation_loss``, ``rows``, ``steps``, ``seconds``, ``shuffled_bytes``; with
    statistics ``worker``, ``start_s`` (since the workers began together), the seconds ``data_s``, ``compute_s``,
    ``encode_s``, ``wait_s`` and ``apply_s``, ``sent_bytes``, ``received_bytes``. ``shuffled_bytes`` of a fit's first
    epoch is the size of the rows that Spark has shuffled, without its compression: 0 where they stayed where they were.
    A fit that continues another one, or begins again at a checkpoint, adds those that it has shuffled itself.
    """

    def plot(self, path: str | PathLike[str]) -> None:  # type: ignore[override]
        """Draw the losses, the bytes sent and a timeline with a lane for every worker into an image file.

        Raises:
            ValueError: there are no statistics of the workers.
        """
        if "worker" not in self:
            raise ValueError(
                "there is nothing to draw for each worker: fit with collect_stats=True"
            )
        from matplotlib.figure import Figure

        frame = pd.DataFrame(self)
        figure = Figure(figsize=(9, 9), layout="constrained")
        losses, sizes, lanes = figure.subplots(3)
        epochs = frame.groupby("epoch")
        for name in ("loss", "validation_loss"):
            losses.plot(epochs[name].first(), marker=".", label=name.replace("_", " "))
        losses.set(xlabel="epoch", ylabel="loss")
        losses.legend()
        for worker, rows in frame.groupby("worker"):
            sizes.plot(rows.epoch, rows.sent_bytes / 1e6, marker=".", label=f"worker {worker}")
        sizes.set(xlabel="epoch", ylabel="MB sent")
        sizes.legend()
        left = frame.start_s.copy()
        for color, name in enumerate(("data_s", "compute_s", "encode_s", "wait_s", "apply_s")):
            label = name.removesuffix("_s")
            lanes.barh(frame.worker, frame[name], left=left, color=f"C{color}", label=label)
            left = left + frame[name]
        lanes.set(xlabel="seconds", ylabel="worker")
        lanes.set_yticks(sorted(frame.worker.unique()))
        lanes.legend(ncols=5)
        figure.savefig(path)
