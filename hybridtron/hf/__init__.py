"""The Hugging Face class of models that no class in transformers is. Its files are shipped with every such model.

Importing this lets AutoConfig and AutoModel know the class by its `model_type`. Of the other files `ops_hybridtron`
alone imports hybridtron, and exported folders have another one. Nothing that starts training imports this.
"""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from hybridtron.hf.configuration_hybridtron import HybridtronConfig
from hybridtron.hf.modeling_hybridtron import HybridtronForCausalLM, HybridtronModel

AutoConfig.register(HybridtronConfig.model_type, HybridtronConfig, exist_ok=True)
AutoModel.register(HybridtronConfig, HybridtronModel, exist_ok=True)
AutoModelForCausalLM.register(HybridtronConfig, HybridtronForCausalLM, exist_ok=True)
