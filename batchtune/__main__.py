"""`python -m batchtune`. It imports from the working folder no more than Python itself has imported before."""

if __name__ == "__main__":
    from batchtune.processes import drop_first_folder

    drop_first_folder()
    from batchtune.cli import main

    main()
