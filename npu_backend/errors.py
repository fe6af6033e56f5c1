"""Every error this package raises on purpose. Each message says what, where, why, and what to do."""

from __future__ import annotations

from collections.abc import Iterable


class NPUBackendError(Exception):
    """Root of every error that npu-backend raises on purpose."""


class ConfigError(NPUBackendError, ValueError):
    """A configuration value or environment variable has no meaning here."""


class PatchConflictError(NPUBackendError):
    """Two owners want one target, or a target no longer holds what its owner put there."""


class PatchTargetError(NPUBackendError):
    """A target does not exist, or its replacement does not fit it."""


class BackendUnavailableError(NPUBackendError, RuntimeError):
    """Something that was asked for by name cannot be used on this host."""


class OperatorInputError(NPUBackendError, ValueError):
    """An operator was called with sizes that it has no meaning for. A patched model never does."""


class HeadInputError(NPUBackendError, ValueError):
    """The PPO head was given tensors or options that it must not compute with."""


def did_you_mean(name: object, known: Iterable[str], cutoff: float = 0.7) -> str:
    """For a message about an unknown name: the known one that was probably meant, whatever the case, or nothing.

    >>> did_you_mean("RMSnorm", ["rms_norm", "rotary"]), did_you_mean("foo", ["rms_norm", "rotary"])
    ("; did you mean 'rms_norm'?", '')
    """
    import difflib  # here, because nobody needs it until something is wrong

    folded = {other.casefold(): other for other in known}
    close = difflib.get_close_matches(str(name).casefold(), folded, n=1, cutoff=cutoff)
    return f"; did you mean {folded[close[0]]!r}?" if close else ""
