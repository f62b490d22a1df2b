import pytest
from pydantic import ValidationError

from jaxmorph.config.sections import Model


def test_weights_are_the_runs_business_and_other_keys_the_factorys():
    model = Model.model_validate({"weights": "some/where", "width": 64, "tied": False})
    assert model.weights == "some/where"
    assert model.options == {"width": 64, "tied": False}
    assert Model().weights is None


@pytest.mark.parametrize("wrong", ["", 3, True])
def test_weights_are_a_path_or_nothing(wrong):
    with pytest.raises(ValidationError):
        Model.model_validate({"weights": wrong})
