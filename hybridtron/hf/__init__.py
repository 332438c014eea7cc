"""The Hugging Face model class for models that no class in transformers fits.

Importing this package registers the class with AutoConfig, AutoModel and AutoModelForCausalLM. The other files in this
folder are shipped with each exported model of this class, which runs without hybridtron. They import nothing from
hybridtron except each other and `mixers_hybridtron`. `interop/shipped_code.py` generates `mixers_hybridtron` from
the code of hybridtron's mixers, for this package and for each exported model.
"""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from hybridtron.interop.shipped_code import provide

provide(__name__)

from hybridtron.hf.configuration_hybridtron import HybridtronConfig  # noqa: E402
from hybridtron.hf.modeling_hybridtron import HybridtronForCausalLM, HybridtronModel  # noqa: E402

AutoConfig.register(HybridtronConfig.model_type, HybridtronConfig, exist_ok=True)
AutoModel.register(HybridtronConfig, HybridtronModel, exist_ok=True)
AutoModelForCausalLM.register(HybridtronConfig, HybridtronForCausalLM, exist_ok=True)
