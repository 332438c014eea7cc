"""The Hugging Face model class for models that no native class fits. Its files are shipped with every such export.

Importing this package registers the class with AutoConfig and AutoModel by its `model_type`. The files beside this one
import nothing from hybridtron except each other and `mixers_hybridtron`. `interop/shipped_code` generates that module
from the package, here as in an export.
"""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from hybridtron.interop.shipped_code import provide

provide(__name__)

from hybridtron.hf.configuration_hybridtron import HybridtronConfig  # noqa: E402
from hybridtron.hf.modeling_hybridtron import HybridtronForCausalLM, HybridtronModel  # noqa: E402

AutoConfig.register(HybridtronConfig.model_type, HybridtronConfig, exist_ok=True)
AutoModel.register(HybridtronConfig, HybridtronModel, exist_ok=True)
AutoModelForCausalLM.register(HybridtronConfig, HybridtronForCausalLM, exist_ok=True)
