"""What all tests share. Being here, it also puts this folder on the import path: `import report_records`."""
