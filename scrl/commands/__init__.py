"""The commands of ``python -m scrl``: each module has ``add_arguments(parser)`` and ``run(options) -> exit code``."""
