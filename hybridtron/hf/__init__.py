"""The Hugging Face class of models that no class in transformers is. Its files are shipped with every such model.

Importing this lets AutoConfig and AutoModel know the class by its `model_type`. The files beside this one import
nothing of hybridtron, only `mixers_hybridtron`, which `interop/shipped_code` makes from the package, as in an export.
"""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from hybridtron.interop.shipped_code import provide

provide(__name__)

from hybridtron.hf.configuration_hybridtron import HybridtronConfig  # noqa: E402
from hybridtron.hf.modeling_hybridtron import HybridtronForCausalLM, HybridtronModel  # noqa: E402

AutoConfig.register(HybridtronConfig.model_type, HybridtronConfig, exist_ok=True)
AutoModel.register(HybridtronConfig, HybridtronModel, exist_ok=True)
AutoModelForCausalLM.register(HybridtronConfig, HybridtronForCausalLM, exist_ok=True)
