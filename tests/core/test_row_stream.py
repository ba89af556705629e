"""The stream of rows after a restart, with several kinds of dataloader."""

from arealite.api.cli_args import DatasetConfig
from arealite.core.row_stream import RowStream
from arealite.dataset.loader import StatefulDataLoader
from arealite.utils.status import waits

ROWS = [{"r": i} for i in range(12)]


class Plain:
    """A dataloader without state."""

    def __iter__(self):
        return iter([ROWS[i : i + 2] for i in range(0, 12, 2)])


class Other(Plain):
    """A stateful dataloader with another kind of state."""

    def state_dict(self):
        return {"i": 0}

    def load_state_dict(self, state):
        assert set(state) == {"i"}


def rows_after(loader, position, done):
    stream = RowStream(loader)
    stream.seek(position, done)
    return [stream.next_row() for _ in range(4)]


def test_the_stream_continues_at_its_position():
    ours = StatefulDataLoader(ROWS, DatasetConfig("x", batch_size=2, shuffle=False))
    for loader in (Plain(), Other(), ours):
        found = [(number, row["r"]) for number, row in rows_after(loader, 5, {6, 13})]
        assert found == [(5, 5), (7, 7), (8, 8), (9, 9)], type(loader)


def test_reading_the_dataloader_is_a_wait_with_a_name():
    def batches():
        yield [entry["kind"] for entry in waits.describe()]

    assert RowStream(batches()).next_row() == (0, "data")
