"""The exchange tables of types: functions in C that give and take arrays without a call of Python's."""

from __future__ import annotations

import weakref

from .. import _core

TABLE = "__dlpack_c_exchange_api__"

tables: weakref.WeakKeyDictionary[type, object] = weakref.WeakKeyDictionary()


def table_of(t: type) -> object:
    """The exchange table of a type; None without a known one. Its functions order nothing: the caller orders the
    streams.
    """
    if t not in tables:
        table = getattr(t, TABLE, None)
        tables[t] = table if table is not None and _core.table_known(table, -1) else None
    return tables[t]
