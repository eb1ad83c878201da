"""What options of other tools are called here: a guess by spelling answers --amp with --fake-samples."""

from __future__ import annotations

from collections.abc import Iterable, Set

from .errors import Refusal

CONTINUES = "nothing to type: the same command continues where it stopped (--fresh starts over)"
LAUNCHED = "a matter of the launcher: launch/single_node.py -g N, launch/multi_node.py -n N -g N -nr N, or torchrun"
TOLD = "nothing to type: torchrun tells each process"

SYNONYMS = {
    "--learning-rate --base-lr --lrate": "--lr",
    "--wd --l2 --weight-decay-rate": "--weight-decay",
    "--opt --optim": "--optimizer",
    "--scheduler --lr-scheduler --lr-scheduler-type --sched": "--schedule",
    "--warmup --num-warmup-steps --lr-warmup-steps": "--warmup-steps",
    "--clip --grad-clip --clip-grad --clip-grad-norm --max-grad-norm --gradient-clip-val": "--clip-norm",
    "--momentum": "no option: --optimizer sgd has Nesterov momentum 0.9; a task may bring its own optimizers",
    "--model-ema --ema-decay --model-ema-decay": "--ema",
    "-b --batch --bs --batchsize --train-batch-size --global-batch-size": "--batch-size, of all processes together",
    "--per-device-train-batch-size --batch-size-per-gpu": "--batch-size, which is of all processes together",
    "--gradient-accumulation-steps --accumulate-grad-batches --grad-accum --accum-iter": "--micro-batches",
    "--micro-batch-size --microbatch-size": "--micro-batch",
    "--max-epochs --num-epochs --num-train-epochs --n-epochs --epoch": "--epochs",
    "--max-iters --iterations --num-steps --max-iter --total-steps": "--max-steps",
    "--start-epoch": CONTINUES,
    "--resume --resume-from --resume-from-checkpoint --auto-resume --continue": CONTINUES,
    "--ckpt --checkpoint --ckpt-path --checkpoint-path --load --weights --pretrained-weights --finetune": "--init-from "
    "for weights to begin from; a run of one's own continues by the same command",
    "--restart --overwrite --overwrite-output-dir --no-resume": "--fresh",
    "--output-dir --out-dir --output --logdir --log-dir --save-dir --work-dir --exp-dir --checkpoint-dir": "--run-dir",
    "--save-every --save-steps --save-freq --save-interval --checkpoint-interval --ckpt-every": "--checkpoint-every",
    "--save-total-limit --keep-last --max-checkpoints": "--keep",
    "--log-interval --logging-steps --print-freq -p --log-freq --log-steps --print-every": "--log-every",
    "--eval-interval --eval-steps --eval-freq --val-interval --val-freq --val-check-interval": "--eval-every",
    "-e --evaluate --eval --test-only --validate --test": "--eval-only",
    "--early-stopping --early-stopping-patience": "--patience",
    "--amp --mixed-precision --autocast --use-amp": "--precision bf16 or --precision fp16",
    "--fp16 --half --float16": "--precision fp16",
    "--bf16 --bfloat16": "--precision bf16",
    "--fp32 --float32": "--precision fp32",
    "--tf32 --allow-tf32": "--precision tf32",
    "--opt-level --apex": "--precision fp16, as apex's O1",
    "--init-scale --static-loss-scale": "--loss-scale",
    "--torch-compile --jit --torchcompile": "--compile",
    "--memory-format --nhwc": "--channels-last",
    "--sync-bn --syncbn": "--sync-batchnorm",
    "--freeze-layers --frozen": "--freeze",
    "-j --worker --workers --num-worker --dataloader-num-workers --n-workers --nw": "--num-workers",
    "--random-seed --manual-seed --rng-seed": "--seed",
    "--cudnn-deterministic --use-deterministic-algorithms": "--deterministic",
    "--fast-dev-run --limit-train-batches --overfit-batches --debug --smoke": "--limit-batches",
    "--use-wandb --report-to --logger": "--wandb",
    "--no-wandb": "--wandb disabled",
    "--data-parallel --dp": "--strategy dp",
    "--ddp --distributed --multiprocessing-distributed": f"{TOLD}; --strategy ddp is the default",
    "--local-rank --rank --world-size --use-env --dist-url --dist-backend --init-method --backend --master-addr "
    "--master-port": TOLD,
    "--gpu --gpu-ids --gpu-id --num-gpus --devices --nproc --nproc-per-node --nnodes --num-nodes": LAUNCHED,
    "--device --cuda --no-cuda --accelerator": "no option: GPUs where there are any (CUDA_VISIBLE_DEVICES chooses)",
    "--config-file --cfg": "--config",
    "-a --arch --network --backbone --net --model-name": "--model (--task classify); your own: --task FILE.py:CLASS",
    "--model": "a part of the task: its class makes the network; --model is an option of --task classify",
    "--data --data-path --data-root --dataset-path --root --train-dir": "--data-dir, with --dataset (--task classify)",
    "--data-dir --dataset": "a part of the task: its class opens the data; they are options of --task classify",
    "--img-size --imgsz --input-size --crop-size": "--image-size (--task classify)",
    "--smoothing": "--label-smoothing (--task classify)",
    "--aa --auto-augment --augmentation": "--augment (--task classify)",
    "--drop --dropout-rate": "--dropout (--task classify)",
    "--fake-data --synthetic --dummy": "--dataset fake (--task classify)",
}
"""Names elsewhere -> what to type here, or why nothing."""

BY_NAME = {name: here for names, here in SYNONYMS.items() for name in names.split()}


def refuse_synonyms(arguments: Iterable[str], options: Set[str]) -> None:
    """Answer a name of another tool with the one here.

    Args:
        arguments: as typed.
        options: what there is with this task, as ``--batch-size``; a task may well have an option --amp.

    Raises:
        Refusal: names it.
    """
    for argument in arguments:
        typed = argument.partition("=")[0]
        name = typed.replace("_", "-")
        if name in BY_NAME and name not in options:
            here = BY_NAME[name]
            raise Refusal(f"{typed}: {'here it is ' * (here[:2] == '--')}{here} (--help lists all options)")
