-- One server, two databases: both programs keep a table called alembic_version.
CREATE DATABASE prefect;
CREATE DATABASE mlflow;
