"""The databases of both servers in one PostgreSQL."""

from urllib.parse import urlsplit, urlunsplit

from schemas.errors import UserError

DATABASES = ("prefect", "mlflow")
VARIABLE = "GRPO_POSTGRES"
"""Environment variable: postgresql://USER:PASSWORD@HOST:PORT keeps the tables of both servers in that PostgreSQL."""


def database_url(postgres: str, driver: str, database: str) -> str:
    """The address of one database, for example postgresql+asyncpg://USER:PASSWORD@HOST:PORT/prefect.

    Raises:
        UserError: `postgres` is not the address of a PostgreSQL server.
    """
    parts = urlsplit(postgres)
    if not parts.scheme.startswith("postgres") or not parts.hostname:
        raise UserError(f"not the address of a PostgreSQL server: {postgres}", fix="postgresql://USER:PASSWORD@HOST:PORT")
    return urlunsplit((driver, parts.netloc, f"/{database}", parts.query, ""))


def create_databases(postgres: str) -> None:
    """Create the databases that do not exist yet.

    Raises:
        UserError: psycopg2 is not installed, or the server does not answer.
    """
    try:
        import psycopg2
    except ImportError as error:
        raise UserError("PostgreSQL needs psycopg2", fix="pip install '.[server]'") from error
    try:
        connection = psycopg2.connect(database_url(postgres, "postgresql", "postgres"))
    except psycopg2.OperationalError as error:
        raise UserError(
            f"PostgreSQL does not answer: {error}", fix="check that it is running, and check user and password"
        ) from error
    connection.autocommit = True
    with connection.cursor() as cursor:
        cursor.execute("SELECT datname FROM pg_database")
        existing = {row[0] for row in cursor.fetchall()}
        for name in DATABASES:
            if name not in existing:
                cursor.execute(f"CREATE DATABASE {name}")
    connection.close()
