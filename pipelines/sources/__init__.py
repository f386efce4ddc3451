"""Raw files as Arrow tables, each row with its origin; two logs joined."""
