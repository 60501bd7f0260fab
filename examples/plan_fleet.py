"""Which GPUs serve a published pair for a number of users, and the command that configures each.

python examples/plan_fleet.py --users 16
"""

import argparse

import trtspec

TARGET, HEAD = "nvidia/Kimi-K2.6-NVFP4", "nvidia/Kimi-K2.6-Eagle3"
FLEET = [("b200", 4), ("b200", 8), ("gb200", 4), ("h200", 8)]


def main() -> None:
    parser = argparse.ArgumentParser(description="Plan one pair on several kinds of GPU.")
    parser.add_argument("--users", type=int, default=16, help="requests at once")
    users = parser.parse_args().users
    for gpu, gpus in FLEET:
        plan = trtspec.plan(TARGET, head=HEAD, gpu=gpu, gpus=gpus, concurrency=[users])
        best = plan["best"]
        if best is None:
            reasons = plan.failure.message if plan.failure else "it does not fit"
            print(f"{gpus} x {gpu}: no, {reasons}")
            continue
        rate = best["tokens_per_s_per_user"]
        print(f"{gpus} x {gpu}: {rate:.0f} tokens/s for each of {users} users ({best['trust']})")
        print(f"  {best['command']}")


if __name__ == "__main__":
    main()
