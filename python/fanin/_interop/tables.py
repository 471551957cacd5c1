"""The exchange tables of types: functions in C that give and take arrays without a call of Python's."""

from __future__ import annotations

import weakref

from .. import _core

TABLE = "__dlpack_c_exchange_api__"

tables: weakref.WeakKeyDictionary[type, object] = weakref.WeakKeyDictionary()


def table_of(t: type) -> object:
    """The exchange table of a type, None where it has none that we know. Its functions order nothing: who reads sees to
    that.
    """
    if t not in tables:
        table = getattr(t, TABLE, None)
        tables[t] = table if table is not None and _core.table_known(table, -1) else None
    return tables[t]
