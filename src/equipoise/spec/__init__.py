"""Every noun of the product as a frozen value: data, model, recipe, study."""
