package state

import (
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/internal/contract/config"
	"github.com/outrelay/outrelay/internal/mongodb"
)

// Database is the state database: the collections with one prefix in one database. It is a small immutable
// value. The zero value is no database.
type Database struct {
	db     *mongo.Database
	prefix string
}

// Open returns the configured state database. It does no I/O.
func Open(client *mongo.Client, cfg config.State) Database {
	return Database{mongodb.Database(client, cfg.Database), cfg.Prefix}
}

// Of returns the state database in db with the default prefix. It is for tests.
func Of(db *mongo.Database) Database {
	return Database{mongodb.Database(db.Client(), db.Name()), config.Default().State.Prefix}
}

// On returns the same state database on another client, such as that of a session.
func (d Database) On(client *mongo.Client) Database {
	return Database{mongodb.Database(client, d.Name()), d.prefix}
}

// Collection returns the state collection called name, without the prefix.
func (d Database) Collection(name string) *mongo.Collection { return d.db.Collection(d.prefix + name) }

// Mongo returns the database with all its collections, also those of others.
func (d Database) Mongo() *mongo.Database { return d.db }

// Client returns the client of the database.
func (d Database) Client() *mongo.Client { return d.db.Client() }

// Name returns the name of the database.
func (d Database) Name() string { return d.db.Name() }

// Prefix returns the start of the names of all state collections.
func (d Database) Prefix() string { return d.prefix }

// Namespace returns the full name of a state collection, for messages.
func (d Database) Namespace(name string) string { return d.db.Name() + "." + d.prefix + name }
