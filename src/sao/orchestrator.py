"""The loop: the only place where trained weights return to the engine.

      TaskSource                                                         RolloutLog (durable)
          |  feed: waits for places and fresh weights                        ^
          v                                                                  | admitted, finished, dropped,
    +-- places (pipeline/admission) --+                                      | published, trained
    |  pending -> running -> ready    |-- play: worker <-> engine --+        |
    +---------------------------------+                             |        |
          ^         |                                               v        |
          |         |  assemble: waits for a full batch          collect ----+
          |         v                                                 rollouts that ended
          |     train: actor x 1 -> publish(version + 1) -> critic x K -> commit
          |         |                  |
          +---------+ places free      +--> deliver: newest weights into the engine, rollouts in flight
                                       +--> evaluate: pinned weights on an engine of its own
    supervise: looks at engine and trainer, bounds failures and silence

Only train is finite; its end, or a failure that cannot be repaired, unwinds the rest.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal, Protocol

import numpy as np

from sao.clock import Clock, gather_or_cancel, limit
from sao.engines.protocol import Engine, EngineError, EngineHealth
from sao.envs.protocol import TaskSource
from sao.observe.metrics import Metric, last, merge
from sao.pipeline.admission import Admission, Member
from sao.pipeline.baselines import Baseline
from sao.pipeline.versions import VersionTree
from sao.rollout.protocol import RolloutWorker
from sao.training.protocol import StepReport, Trainer
from sao.types import Batch, FailureKind, Rollout, Snapshot
