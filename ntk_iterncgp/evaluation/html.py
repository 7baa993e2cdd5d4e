from typing import Any


def write_report(*a: Any, **k: Any) -> None: ...
