package doctor

import (
	"slices"
	"strings"

	"github.com/outrelay/outrelay/internal/contract/config"
	"github.com/outrelay/outrelay/internal/contract/record"
	"github.com/outrelay/outrelay/internal/relay/changes"
	"github.com/outrelay/outrelay/internal/relay/connect"
	"github.com/outrelay/outrelay/internal/relay/stored/state"
	"github.com/outrelay/outrelay/internal/service/inbox"
	"github.com/outrelay/outrelay/internal/service/sagas"
	"github.com/outrelay/outrelay/internal/service/setaside"
)

type roleMaker struct {
	cfg   config.Config
	scope *changes.Scope
	who   RolesFor
}

var readWrite = connect.ReadWrite

// indexActions are needed if documents expire. Their index is created, changed and dropped with the
// configuration.
var indexActions = []string{"listIndexes", "createIndex", "dropIndex", "collMod"}

// onOutboxes returns privileges with the same actions on every watched collection, or on the
// collections whose names name returns for them.
func (m *roleMaker) onOutboxes(name func(coll string) string, why string, actions ...string) (out []Privilege) {
	for _, ns := range m.cfg.Watch {
		db, coll, _ := strings.Cut(ns, ".")
		// Privileges do not support patterns, so a pattern becomes the empty name, which means all.
		if strings.ContainsAny(db, "*?") {
			db = ""
		}
		if strings.ContainsAny(coll, "*?") {
			coll = ""
		} else {
			coll = name(coll)
		}
		out = addPrivileges(out, privilegeOn(db, coll, why, actions...))
	}

	return out
}

// addPrivileges adds privileges to a list. It merges the actions on the same resource.
func addPrivileges(list []Privilege, more ...Privilege) []Privilege {
	for _, p := range more {
		at := slices.IndexFunc(list,
			func(privilege Privilege) bool {
				return privilege.Resource == p.Resource && privilege.Optional == p.Optional
			})
		if at < 0 {
			p.Actions = slices.Clone(p.Actions)
			list = append(list, p)
			continue
		}

		for _, a := range p.Actions {
			if !slices.Contains(list[at].Actions, a) {
				list[at].Actions = append(list[at].Actions, a)
			}
		}

		if p.Why != "" && !strings.Contains(list[at].Why, p.Why) {
			list[at].Why += "; " + p.Why
		}
	}

	return list
}

func (r *Role) add(more ...Privilege) { r.Privileges = addPrivileges(r.Privileges, more...) }

func privilegeOn(db, coll, why string, actions ...string) Privilege {
	return Privilege{Resource: Resource{DB: db, Collection: coll}, Actions: actions, Why: why}
}

// asOptional returns the privileges as ones without which only some things do not work.
func asOptional(optional string, list ...Privilege) []Privilege {
	for i := range list {
		list[i].Optional = optional
	}
	return list
}

func sameName(coll string) string { return coll }

// databaseNames returns the databases of watch. A pattern becomes "", which means all databases.
func (m *roleMaker) databaseNames() (out []string) {
	for _, ns := range m.cfg.Watch {
		db, _, _ := strings.Cut(ns, ".")
		if strings.ContainsAny(db, "*?") {
			db = ""
		}
		if !slices.Contains(out, db) {
			out = append(out, db)
		}
	}
	return out
}

// listCollections returns the privileges to read the UUIDs of collections, which distinguish a
// collection from an earlier one with the same name.
func (m *roleMaker) listCollections(optional string) (out []Privilege) {
	for _, db := range m.databaseNames() {
		out = append(out, privilegeOn(db, "", "read the UUID of each collection, which distinguishes it from an earlier collection of the same name", "listCollections"))
	}
	return asOptional(optional, out...)
}

// serviceDatabases returns the databases in which outrelay searches for the collections of services. "" means all databases.
func (m *roleMaker) serviceDatabases() []string {
	names := m.databaseNames()
	if slices.Contains(names, "") {
		return names
	}
	for _, db := range m.cfg.Consumers.Databases {
		if !slices.Contains(names, db) {
			names = append(names, db)
		}
	}
	return names
}

// onHandlerLetters returns privileges on the dead letters of handlers.
func (m *roleMaker) onHandlerLetters(optional, why string, actions ...string) (out []Privilege) {
	for _, db := range m.serviceDatabases() {
		for _, coll := range m.cfg.DeadLetters.Handlers {
			out = append(out, privilegeOn(db, coll, why, actions...))
		}
	}
	return asOptional(optional, out...)
}

func clusterPrivilege(optional, why string, actions ...string) Privilege {
	return Privilege{Resource: Resource{Cluster: true}, Actions: actions, Why: why, Optional: optional}
}

func (m *roleMaker) relayRole() Role {
	role := Role{Name: m.who.Prefix + "Relay", For: "the relay"}
	db, coll := m.scope.Target()

	role.add(privilegeOn(db, coll, "open the change stream", "find", "changeStream"))
	role.add(m.onOutboxes(sameName, "read envelopes", "find")...)
	if writesOutboxes(m.cfg) {
		role.add(m.onOutboxes(sameName, "record deliveries, remove delivered envelopes", readWrite...)...)
	}
	role.add(m.onState("store leases, positions, waiting events and dead letters", readWrite...)...)
	role.add(asOptional("without them run outrelay setup before the first start of each version",
		m.onState("create the collections and their indexes", "createCollection", "createIndex", "listIndexes")...)...)
	role.add(m.listCollections("without it the relay cannot detect that a collection was dropped and created again")...)

	// A pattern of databases is matched against the names of all databases.
	if slices.Contains(m.databaseNames(), "") {
		role.add(clusterPrivilege("without it the relay finds only collections that watch names without a pattern", "find the databases that match watch", "listDatabases"))
	}

	role.add(clusterPrivilege("without them the relay cannot read the time window of the oplog and the limits of the servers, or detect state that was copied from another replica set",
		"read the limits and the identity of the replica set", "serverStatus", "replSetGetConfig", "getParameter"))

	// The relay changes indexes of outboxes only if it has to maintain a TTL index.
	indexes := []string{"listIndexes"}
	if m.cfg.Purge.TTL > 0 {
		indexes = indexActions
	}

	const optional = "without it the relay does not report missing indexes, and documents do not expire"
	if writesOutboxes(m.cfg) {
		role.Privileges = slices.Concat(role.Privileges,
			asOptional(optional, m.onOutboxes(sameName, "compare the indexes with the required indexes", indexes...)...))
	}
	role.Privileges = append(role.Privileges, m.handlerLetterPrivileges()...)
	return role
}

// writesOutboxes reports whether the relay writes to the outboxes of services: it removes delivered envelopes, or records
// deliveries on them. Otherwise it only reads them, as long as nobody schedules an event.
func writesOutboxes(cfg config.Config) bool {
	return cfg.Retention > 0 || cfg.Recording != "position"
}

// onState returns privileges on the state database, or on each of its collections if services use the database too.
func (m roleMaker) onState(why string, actions ...string) (out []Privilege) {
	name := m.cfg.State.Database
	if !connect.IsStateWatched(m.cfg) {
		return []Privilege{privilegeOn(name, "", why, actions...)}
	}
	for _, coll := range state.NamesWith(m.cfg.State.Prefix) {
		out = append(out, privilegeOn(name, coll, why, actions...))
	}
	return out
}

// handlerLetterPrivileges returns the privileges of the relay on the dead letters of handlers. With http.admin, people act by its user.
func (m *roleMaker) handlerLetterPrivileges() []Privilege {
	if m.cfg.HTTP.Admin == nil {
		return m.onHandlerLetters("without it the relay does not count the dead letters of handlers", "count the dead letters of handlers", "find")
	}

	const optional = "without it the page and the API cannot show or requeue the dead letters of handlers"
	return append(m.onHandlerLetters(optional, "show, requeue and discard the dead letters of handlers", "find", "update", "remove"),
		asOptional("without it the page and the API cannot show and change the messages, inboxes and sagas of services", m.operateConsumers()...)...)
}

// readConsumers returns the privileges to read the messages of handlers that wait, the inboxes and the sagas of services.
func (m *roleMaker) readConsumers() (out []Privilege) {
	for _, db := range m.serviceDatabases() {
		out = append(out,
			privilegeOn(db, setaside.DefaultCollection, "show the messages that handlers retry", "find"),
			privilegeOn(db, setaside.DefaultCollection+setaside.CountsSuffix, "show the consumer groups and their suspended handlers", "find"))
		for _, suffix := range []string{"", inbox.OffsetsSuffix, inbox.ClaimsSuffix} {
			out = append(out, privilegeOn(db, m.who.Inbox+suffix, "show the inboxes", "find"))
		}
		for _, coll := range append([]string{sagas.TypesCollection}, m.who.Sagas...) {
			out = append(out, privilegeOn(db, coll, "show the sagas", "find"))
		}
	}
	return out
}

// operateConsumers returns the privileges to also change what readConsumers reads.
func (m *roleMaker) operateConsumers() []Privilege {
	out := m.readConsumers()
	for _, db := range m.serviceDatabases() {
		out = addPrivileges(out,
			privilegeOn(db, setaside.DefaultCollection, "retry and discard them, and return requeued messages", "insert", "update"),
			privilegeOn(db, m.who.Inbox, "purge marks", "remove"),
			privilegeOn(db, m.who.Inbox+inbox.ClaimsSuffix, "release claims", "remove"))
	}
	return out
}

// setupRole returns the role for `outrelay setup`. The relay then runs with mongodb.indexes: false
// and does not need these privileges.
func (m *roleMaker) setupRole() Role {
	role := Role{Name: m.who.Prefix + "Setup", For: "outrelay setup, once for each version; the relay then runs with mongodb.indexes: false"}
	schema := []string{"createCollection", "createIndex", "dropIndex", "listIndexes", "collMod"}

	role.add(m.onOutboxes(sameName, "create the outbox and its indexes", schema...)...)
	role.add(m.onState("create the collections of the state and their indexes", slices.Concat(readWrite, schema)...)...)
	role.add(m.listCollections("")...)

	if slices.Contains(m.databaseNames(), "") {
		role.add(clusterPrivilege("", "find the databases that match watch", "listDatabases"))
	}
	return role
}

func (m *roleMaker) serviceRole() Role {
	return Role{
		Name: m.who.Prefix + "Service", For: "a service that appends events, in addition to the privileges on its own documents",
		Privileges: m.onOutboxes(sameName, "append events", "insert"),
	}
}

func (m *roleMaker) schedulerRole() Role {
	role := Role{Name: m.who.Prefix + "Scheduler", For: "a service that schedules, cancels or repeats events, in addition to " + m.who.Prefix + "Service"}
	role.add(m.onOutboxes(sameName, "find, reschedule and cancel scheduled events", "find", "update", "remove")...)
	role.add(m.onOutboxes(func(coll string) string { return coll + "_cron" }, "store the entries of outbox/cron", readWrite...)...)
	return role
}

// consumerRole returns the role of services that consume events.
func (m *roleMaker) consumerRole() Role {
	role := Role{Name: m.who.Prefix + "Consumer", For: "a service that handles events with an inbox, sagas and dead letters, in addition to the privileges on its own documents"}
	databases := m.who.Databases
	if len(databases) == 0 {
		databases = slices.Compact(slices.Sorted(slices.Values(slices.Concat(m.databaseNames(), m.cfg.Consumers.Databases))))
		databases = slices.DeleteFunc(databases, func(db string) bool { return db == "" })
	}
	schema := []string{"createCollection", "createIndex", "listIndexes"}
	// Services create their collections and indexes themselves.
	for _, db := range databases {
		for _, suffix := range []string{"", inbox.OffsetsSuffix, inbox.ClaimsSuffix, inbox.TenuresSuffix} {
			role.add(privilegeOn(db, m.who.Inbox+suffix, "record handled messages", slices.Concat(readWrite, schema)...))
		}

		role.add(privilegeOn(db, record.RatesCollection, "share the rates of handlers", slices.Concat(readWrite, schema)...),
			privilegeOn(db, record.TopicsCollection, "store the topics that groups add", slices.Concat(readWrite, schema)...))
		role.add(privilegeOn(db, setaside.DefaultCollection, "store messages that wait for a retry", slices.Concat(readWrite, schema)...))
		role.add(privilegeOn(db, setaside.DefaultCollection+setaside.CountsSuffix, "count messages that wait for a retry", slices.Concat(readWrite, schema)...))
		for _, coll := range m.cfg.DeadLetters.Handlers {
			role.add(privilegeOn(db, coll, "store the dead letters of handlers", slices.Concat(readWrite, schema, []string{"collMod"})...))
		}
		for _, coll := range append(slices.Clone(m.who.Sagas), sagas.TypesCollection) {
			if len(m.who.Sagas) > 0 {
				role.add(privilegeOn(db, coll, "store the states of sagas", slices.Concat(readWrite, schema)...))
			}
		}

		role.add(privilegeOn(db, "", "create collections before a transaction uses them", "listCollections"))
	}

	return role
}

func (m *roleMaker) operatorRole() Role {
	role := Role{Name: m.who.Prefix + "Operator", For: "operators who change data: outrelay pause, dead, scheduled, replay, purge, recover"}

	role.add(m.onOutboxes(sameName, "show, requeue, cancel and remove envelopes", readWrite...)...)
	role.add(m.onHandlerLetters("", "show, requeue and discard the dead letters of handlers", "find", "update", "remove")...)

	role.add(m.operateConsumers()...)
	role.add(m.onState("store pause, pin and recover, requeue and discard dead letters, and record each action", readWrite...)...)
	role.add(m.listCollections("")...)
	role.add(clusterPrivilege("without them the purge uses the longest margin, and recover cannot detect copied state", "read the limits and the identity of the replica set", "getParameter", "replSetGetConfig", "serverStatus"))

	return role
}

func (m *roleMaker) readerRole() Role {
	role := Role{Name: m.who.Prefix + "Reader", For: "people and monitoring that only read: outrelay status, dead list, doctor"}

	role.add(m.onOutboxes(sameName, "count and show waiting envelopes, including their payloads", "find", "listIndexes")...)
	role.add(m.onHandlerLetters("", "count and show the dead letters of handlers, including their payloads", "find")...)

	role.add(m.readConsumers()...)
	role.add(m.onState("read the status, and show waiting events and dead letters, including their payloads", "find", "listIndexes")...)
	role.add(m.listCollections("")...)
	role.add(clusterPrivilege("without it the time window of the oplog is not shown", "read the time window of the oplog", "serverStatus"))

	return role
}
