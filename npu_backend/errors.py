"""Every error this package raises on purpose. Each message says what, where, why, and what to do."""


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
