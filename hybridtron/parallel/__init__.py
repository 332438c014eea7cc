"""What is cut over processes, on megatron-core. What core warns of at import is told better by the start-up table."""

import warnings

warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.core")
warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
