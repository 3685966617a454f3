"""Learning from sessions: progress, checkpoints, and the way back."""

import dataclasses

from fastapi import APIRouter

from hf_recurrent.server.routes.errors import ApiError
from hf_recurrent.server.routes.running_jobs import call
from hf_recurrent.server.routes.schemas import CheckpointRequest
from hf_recurrent.server.routes.served_model import ServedModel
from hf_recurrent.server.session_learner import SessionLearner


def learning_routes(served: ServedModel) -> APIRouter:
    routes = APIRouter(prefix="/v1/learning")
    scheduler = served.scheduler

    @routes.get("")
    async def describe() -> dict:
        """Bytes, updates and bits per byte so far, and the checkpoints."""
        return await call(scheduler, _about, _learner(served))

    @routes.post("/checkpoints")
    async def save() -> dict:
        """Write a checkpoint now."""
        return {"checkpoint": await call(scheduler, _learner(served).save)}

    @routes.post("/unlearn")
    async def unlearn(body: CheckpointRequest) -> dict:
        """Go back to the weights of a checkpoint."""
        try:
            await call(scheduler, _learner(served).unlearn, body.checkpoint)
        except ValueError as error:
            raise ApiError(400, str(error), "checkpoint") from error
        return await describe()

    return routes


def _learner(served: ServedModel) -> SessionLearner:
    if served.scheduler.learner is None:
        raise ApiError(400, "This server does not learn; start it with --learn.")
    return served.scheduler.learner


def _about(learner: SessionLearner) -> dict:
    return dataclasses.asdict(learner.record()) | {"failures": learner.failures, "checkpoints": learner.checkpoints()}
