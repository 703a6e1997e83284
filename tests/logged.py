"""What is logged while a test runs; `-p no:logging` leaves out the plugin of pytest that tells it."""

import logging


class Records(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.kept.append(record)

    def text(self) -> str:
        return "\n".join(map(self.format, self.kept))
