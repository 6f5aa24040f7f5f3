"""`python -m batchtune`. Beyond what Python itself imports, nothing comes from the working folder."""

if __name__ == "__main__":
    from batchtune.processes import drop_first_folder

    drop_first_folder()
    from batchtune.cli import main

    main()
