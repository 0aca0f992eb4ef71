"""Conditions that try to reach more than the rows: files, network, settings, other tables, or to use up the machine.

`{tmp}` is a folder with a secret, `{port}` a port that listens.
"""

FILES = """
EXISTS (SELECT 1 FROM '{tmp}/secret.csv')
EXISTS (FROM '{tmp}/secret.csv')
EXISTS (SELECT 1 FROM read_text('{tmp}/secret.csv') WHERE content LIKE '%hidden%')
EXISTS (SELECT 1 FROM read_blob('{tmp}/secret.csv'))
EXISTS (SELECT 1 FROM read_csv('{tmp}/secret.csv'))
EXISTS (SELECT 1 FROM read_csv_auto('{tmp}/secret.csv'))
EXISTS (SELECT 1 FROM read_json('{tmp}/secret.csv'))
EXISTS (SELECT 1 FROM read_parquet('{tmp}/*.parquet'))
EXISTS (SELECT 1 FROM parquet_metadata('{tmp}/x.parquet'))
EXISTS (SELECT 1 FROM glob('{tmp}/*'))
EXISTS (SELECT 1 FROM sniff_csv('{tmp}/secret.csv'))
EXISTS (SELECT 1 FROM parquet_scan('/etc/passwd'))
EXISTS (SELECT 1 FROM arrow_scan(1, 2, 3))
EXISTS (SELECT 1 FROM sqlite_scan('{tmp}/x.db', 't'))
item_id IN (SELECT content FROM read_text('/etc/hostname'))
item_id = (SELECT content FROM read_text('/proc/self/environ'))
item_id = (TABLE '{tmp}/secret.csv')
item_id IN (FROM read_text('{tmp}/secret.csv') SELECT content)
read_text('{tmp}/secret.csv') = 'x'
glob('{tmp}/*') IS NOT NULL
write_log('{tmp}/out') IS NULL
EXISTS (COPY embeddings TO '{tmp}/out.csv')
true; COPY embeddings TO '{tmp}/out.csv'
true) TO '{tmp}/out.csv' (FORMAT csv
EXISTS (EXPORT DATABASE '{tmp}/out')
EXISTS (IMPORT DATABASE '{tmp}/out')
EXISTS (ATTACH '{tmp}/out.db')
EXISTS (ATTACH '{tmp}/out.db' AS other (TYPE sqlite))
true; ATTACH '{tmp}/out.db'
true; DETACH memory
"""

NETWORK = """
EXISTS (SELECT 1 FROM read_csv('http://127.0.0.1:{port}/x.csv'))
EXISTS (SELECT 1 FROM read_parquet('https://127.0.0.1:{port}/x.parquet'))
EXISTS (SELECT 1 FROM read_text('s3://bucket/secret'))
EXISTS (SELECT 1 FROM 'http://127.0.0.1:{port}/x.json')
EXISTS (SELECT 1 FROM postgres_scan('host=127.0.0.1 port={port}', 'public', 't'))
EXISTS (SELECT 1 FROM mysql_query('x', 'SELECT 1'))
EXISTS (SELECT 1 FROM iceberg_scan('http://127.0.0.1:{port}/t'))
EXISTS (SELECT 1 FROM delta_scan('http://127.0.0.1:{port}/t'))
http_get('http://127.0.0.1:{port}/') IS NULL
EXISTS (INSTALL httpfs)
true; INSTALL httpfs FROM 'http://127.0.0.1:{port}/'
EXISTS (LOAD httpfs)
true; LOAD '{tmp}/x.duckdb_extension'
EXISTS (FORCE INSTALL spatial)
"""

SETTINGS = """
getenv('HOME') IS NOT NULL
current_setting('home_directory') IS NOT NULL
current_setting('memory_limit') > ''
EXISTS (SELECT 1 FROM duckdb_settings())
EXISTS (SELECT 1 FROM duckdb_secrets())
EXISTS (SELECT 1 FROM which_secret('s3://b', 's3'))
EXISTS (SET enable_external_access = true)
true; SET enable_external_access = true
true; RESET enable_external_access
true; PRAGMA enable_profiling
EXISTS (PRAGMA database_list)
EXISTS (SELECT 1 FROM pragma_database_list())
EXISTS (CREATE SECRET s (TYPE s3, KEY_ID 'x'))
version() > ''
pg_backend_pid() > 0
pg_typeof(item_id) = 'varchar'
current_user = 'duckdb'
session_user > ''
current_database() = 'memory'
current_schemas(true) IS NOT NULL
current_query() LIKE '%embeddings%'
txid_current() > 0
in_search_path('memory', 'main')
set_config('threads', '8', false) = '8'
set_bit('0'::BIT, 0, 1) IS NOT NULL
nextval('s') > 0
now() > TIMESTAMP '2020-01-01'
random() < 2
uuid() IS NOT NULL
setseed(0.5) IS NULL
error('stop') IS NULL
"""

OTHER_TABLES = """
item_id IN (SELECT item_id FROM embeddings)
EXISTS (SELECT 1 FROM embeddings e WHERE e.item_id > 'a')
segment = (SELECT max(segment) FROM embeddings)
EXISTS (SELECT 1 FROM information_schema.tables)
EXISTS (SELECT 1 FROM duckdb_tables())
EXISTS (SELECT 1 FROM duckdb_functions())
EXISTS (SELECT 1 FROM pg_catalog.pg_class)
EXISTS (SELECT 1 FROM sqlite_master)
EXISTS (SHOW TABLES)
EXISTS (DESCRIBE embeddings)
EXISTS (SUMMARIZE embeddings)
EXISTS (SELECT 1 FROM query('SELECT * FROM read_text(''{tmp}/secret.csv'')'))
EXISTS (SELECT 1 FROM query_table('embeddings'))
EXISTS (SELECT 1 FROM secret_rows)
EXISTS (VALUES (1))
EXISTS (CALL pragma_version())
item_id = ANY (SELECT 'x')
segment = ALL (SELECT 1)
(SELECT true)
(WITH t AS (SELECT true AS b) SELECT b FROM t)
true) UNION SELECT 0 FROM range(3) WHERE (true
true) UNION ALL SELECT 1 WHERE (true
true) ORDER BY (1
true) LIMIT (1
true) --
true /*
true, false
true; DROP TABLE embeddings
true; CREATE TABLE t AS SELECT 1
true; UPDATE embeddings SET item_id = 'x'
EXISTS (DELETE FROM embeddings RETURNING 1)
EXISTS (INSERT INTO embeddings VALUES (1) RETURNING 1)
true FROM range(3)
rowid = 0
__row_number = 0
embeddings IS NOT NULL
COLUMNS(*) IS NULL
*
?
$1 = 1
:x = 1
#1 = 1
DEFAULT
system.main.lower(item_id) = 'a'
main.lower(item_id) = 'a'
row_number() OVER () = 1
count(*) > 0
sum(segment) OVER () > 0
max(segment) FILTER (WHERE true) = 1
first(item_id ORDER BY segment) = 'a'
list(item_id) = ['a']
json_execute_serialized_sql('x') IS NULL
json_serialize_sql('SELECT 1') > ''
CAST(item_id AS embeddings) IS NULL
CAST(segment AS INTEGER[1000000]) IS NULL
"""

ENDLESS = """
length(repeat('x', 1000000000)) > 0
repeat(item_id, 1000000000) = ''
len(range(1000000000)) > 0
len(generate_series(1, 1000000000)) > 0
(SELECT count(*) FROM range(10000000) a, range(10000000) b) > 0
EXISTS (WITH RECURSIVE t(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM t) SELECT 1 FROM t WHERE n < 0)
[x FOR x IN range(100000000)] IS NULL
list_transform(range(100000000), x -> x) IS NULL
list_reduce(range(100000000), (x, y) -> x + y) > 0
unnest(range(1000000000)) > 0
regexp_matches(caption, '(a+)+$')
caption ~ '(a|a)*b'
caption SIMILAR TO '(a+)+b'
regexp_replace(caption, '.*', repeat('x', 100000)) = ''
rpad(caption, 1000000000, 'x') = ''
lpad(caption, 1000000000, 'x') = ''
format('{{:1000000000}}', caption) = ''
printf('%1000000000d', segment) = ''
levenshtein(caption, 'aaaa') > 1
array_to_string(range(10000000), caption) = ''
string_split(caption, '') IS NULL
caption || caption = ''
concat(caption, caption) = ''
replace(caption, 'a', 'aaaaaaaaaaaaaaaaaaaaaaaaaaaa') = ''
caption ILIKE '%a%a%a%a%a%a%a%a%a_'
caption LIKE caption
caption LIKE '%a%a%a%a%!' ESCAPE '!'
'aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa' LIKE '%a%a%a%a%a%a%a%a%a%b_'
9 ** 9 ** 9 ** 9 > 0
factorial(33) > 0
170!::DOUBLE > 0
sleep(100) IS NULL
TRY(error('x')) IS NULL
bitstring('1', 1000000000) IS NULL
"""

ATTACKS = [
    *(line for group in (FILES, NETWORK, SETTINGS, OTHER_TABLES, ENDLESS) for line in group.strip().splitlines()),
    "NOT " * 900 + "true",
    "(" * 1500 + "true" + ")" * 1500,
    "true" + " OR true" * 600,
    "segment IN (" + ",".join(["1"] * 2500) + ")",
    "item_id = '" + "x" * 9000 + "'",
    "1" + "+1" * 1800 + " > 0",
    "'\0' = item_id; SELECT 1",
]
