"""The application that a RayService names: Ray Serve takes its configuration, and the function makes what it says."""

import pytest
import yaml
from deployments import kuberay_texts

from embedder.plugins.serve.ray_serve import application_of_manifest


def test_ray_serve_takes_the_configuration_and_the_application_has_its_replicas(tmp_path):
    pytest.importorskip("grpc_reflection", reason="Ray Serve is not installed: pip install 'embedder[ray-serve]'")
    from ray.serve.schema import ServeDeploySchema

    document = yaml.safe_load(kuberay_texts(tmp_path)["rayservice.yaml"])
    found = ServeDeploySchema.model_validate(yaml.safe_load(document["spec"]["serveConfigV2"]))
    (application,) = found.applications
    assert application.import_path == "embedder.plugins.serve.ray_serve:application_of_manifest"
    assert (found.http_options.host, found.http_options.port) == ("0.0.0.0", 8000)
    made = application_of_manifest(dict(application.args))._bound_deployment
    assert made._deployment_config.autoscaling_config.min_replicas == 1
    assert made._deployment_config.autoscaling_config.max_replicas == 4
    assert made.ray_actor_options["num_cpus"] == 2.0
