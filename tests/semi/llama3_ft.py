"""What torchtitan 0.2's `experiments/ft/llama3/train_configs/debug_model.toml` sets."""

LLAMA3_FT = """\
[job]
dump_folder = "./outputs"
description = "Llama 3 debug training"
[profiling]
enable_profiling = true
profile_freq = 10
[metrics]
log_freq = 1
enable_tensorboard = false
[model]
name = "llama3_ft"
flavor = "debugmodel"
hf_assets_path = "./tests/assets/tokenizer"
[optimizer]
name = "AdamW"
lr = 8e-4
eps = 1e-8
[lr_scheduler]
warmup_steps = 2
decay_ratio = 0.8
decay_type = "linear"
min_lr_factor = 0.0
[training]
local_batch_size = 8
seq_len = 2048
max_norm = 1.0
steps = 100
dataset = "c4_test"
[parallelism]
data_parallel_replicate_degree = 1
data_parallel_shard_degree = -1
[checkpoint]
enable = false
interval = 10
last_save_model_only = false
[activation_checkpoint]
mode = "selective"
selective_ac_option = "2"
[comm]
train_timeout_seconds = 15
[fault_tolerance]
enable = true
sync_steps = 10
num_fragments = 2
semi_sync_method = "diloco"
process_group = "nccl"
process_group_timeout_ms = 10000
[validation]
enable = false
dataset = "c4_validation"
freq = 5
steps = 10
"""

STDLIB = '[data]\nsource = "stdlib"\n'
"""What a machine without its dataset needs besides."""
