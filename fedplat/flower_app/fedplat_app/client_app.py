"""The client's side of any scenario."""

from fedplat.scenario_app import ScenarioApp

app = ScenarioApp()
