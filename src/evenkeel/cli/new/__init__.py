"""A project of a user's own that has this package as a dependency: written once, and compared with newer versions.

    command.py  new NAME: check what is typed, write, and say what has been written
    update.py   update: what a newer version would write otherwise, as a diff
    source.py   where a project gets the package; by default from where this one came
    project.py  from answers to the texts of the files; write them, all or none; the record of what was written
    templates/  the files; those that the repository has too are links to its own

project.py and source.py need the standard library only: tools/make_it_yours.py --thin calls them without torch.

Not here: the name's rules (`common/package_name.py`); the task that `train.py` takes by default (`tasks/registry.py`).
Optional: delete this folder with its tests and docs/thin.md.
"""
