"""A run whose network is cut into stages: which of them this process is, and what all of them know of a window."""

from detector import distributed
from detector.config.settings import Settings
from detector.data.batch import Batch
from detector.errors import ConfigError
from detector.mesh import Mesh
from detector.model.cost import layer_costs
from detector.model.network import Network
from detector.model.staging import first_layers, stage_count, told
from detector.run.run import Run, Say
from detector.step.pipeline import Pipeline


def mesh_of(settings: Settings) -> Mesh:
    """How the run's processes share its work. ConfigError where they cannot as the settings say."""
    mesh = Mesh.of(stage_count(settings.pipeline, distributed.world_size()))
    if mesh.stages > 1 and settings.norm == "sync":
        raise ConfigError(
            "bn=sync: devices would wait for each other inside layers, and in a pipeline not all of them run the same "
            "ones; set bn to batch, or to frozen with trained weights, or set pipeline=off"
        )
    if mesh.stages > 1 and settings.compile != "off":
        raise ConfigError(
            f"compile={settings.compile}: what is compiled is a whole network, and in a pipeline each device runs a "
            "part of one; set compile=off, or pipeline=off"
        )
    return mesh


def pipeline_of(settings: Settings, network: Network, mesh: Mesh, say: Say) -> Pipeline | None:
    """The stage that this process runs; None: all layers."""
    if mesh.stages == 1:
        return None
    costs = layer_costs(network, settings.imgsz)
    starts = first_layers(settings.pipeline, mesh.stages, costs)
    replicas = f"{mesh.replicas} {'replica' if mesh.replicas == 1 else 'replicas'}"
    say(f"pipeline  {mesh.stages} stages: {told(starts, costs)}; {replicas}")
    return Pipeline(mesh, network, starts, len(network.head.terms), next(network.parameters()).device)


def for_all_stages(run: Run, held: list[Batch]) -> list[Batch]:
    """The micro-batches that a replica's first stage has loaded; on its other stages without the images."""
    if not (pipeline := run.rules.pipeline):
        return held
    sent = pipeline.from_first([batch.without_images() for batch in held])
    return held if run.mesh.first else sent
