package doctor

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/base/glob"
	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/relay/stored/state"
)

// Resource is the resource of a privilege: collections, or the cluster. An empty name of a database means all databases, and
// an empty name of a collection all collections except system collections.
type Resource struct {
	DB, Collection string
	Cluster        bool

	any bool // everything, which only some built-in roles have
}

func (r Resource) String() string {
	switch {
	case r.Cluster:
		return "the cluster"
	case r.DB == "" && r.Collection == "":
		return "all databases"
	case r.Collection == "":
		return "database " + r.DB
	}
	return r.DB + "." + r.Collection
}

// MarshalJSON writes the resource in the syntax of MongoDB, in which empty names count.
func (r Resource) MarshalJSON() ([]byte, error) {
	if r.Cluster {
		return []byte(`{"cluster":true}`), nil
	}
	return json.Marshal(struct {
		DB         string `json:"db"`
		Collection string `json:"collection"`
	}{r.DB, r.Collection})
}

// covers reports whether a privilege on r includes want. An empty name in want means all names.
func (r Resource) covers(want Resource) bool {
	switch {
	case r.any:
		return true
	case r.Cluster || want.Cluster:
		return r.Cluster && want.Cluster
	case r.DB != "" && r.DB != want.DB:
		return false
	case r.Collection != "":
		return r.Collection == want.Collection
	}

	// A privilege on all collections of a database does not include those of the system.
	return !strings.HasPrefix(want.Collection, "system.")
}

// statement returns the resource in the syntax of mongosh.
func (r Resource) statement() string {
	if r.Cluster {
		return "{cluster: true}"
	}
	return fmt.Sprintf("{db: %q, collection: %q}", r.DB, r.Collection)
}

// access contains the privileges of the user.
type access struct {
	off        bool // access control is disabled
	logins     []login
	privileges []Privilege
	roles      int
	role       string // a role of the user that can be extended, or ""
}

// storedPrivilege is a privilege in a reply of MongoDB.
type storedPrivilege struct {
	Resource struct {
		DB      *string `bson:"db"`
		Coll    *string `bson:"collection"`
		Cluster bool    `bson:"cluster"`
		Any     bool    `bson:"anyResource"`
	} `bson:"resource"`
	Actions []string `bson:"actions"`
}

// add adds a privilege. It leaves out those on other kinds of resources, such as system_buckets, which the relay does not need.
func (a *access) add(privilege storedPrivilege) {
	resource := Resource{Cluster: privilege.Resource.Cluster, any: privilege.Resource.Any}
	if privilege.Resource.DB != nil && privilege.Resource.Coll != nil {
		resource.DB, resource.Collection = *privilege.Resource.DB, *privilege.Resource.Coll
	} else if !resource.Cluster && !resource.any {
		return
	}
	a.privileges = append(a.privileges, Privilege{Resource: resource, Actions: privilege.Actions})
}

// missing returns the actions that no privilege allows on resource.
func (a access) missing(resource Resource, actions ...string) []string {
	var out []string
	for _, action := range actions {
		if !a.off && !slices.ContainsFunc(a.privileges, func(privilege Privilege) bool {
			return privilege.Resource.covers(resource) && slices.Contains(privilege.Actions, action)
		}) {
			out = append(out, action)
		}
	}
	return out
}

// lacking returns the parts of privileges that the user lacks, also as texts.
func (a access) lacking(privileges []Privilege) (missing []Privilege, named []string) {
	for _, p := range privileges {
		if denied := a.missing(p.Resource, p.Actions...); len(denied) > 0 {
			p.Actions = denied
			missing = append(missing, p)
			named = append(named, p.String())
		}
	}
	return missing, named
}

// grant returns the statement that grants the missing privileges.
func (a access) grant(missing ...Privilege) string {
	list := make([]string, len(missing))
	for i, p := range missing {
		list[i] = p.statement()
	}

	privileges := "[" + strings.Join(list, ", ") + "]"
	if a.role != "" {
		return fmt.Sprintf("db.getSiblingDB(\"admin\").grantPrivilegesToRole(%q, %s)", a.role, privileges)
	}

	return fmt.Sprintf("db.getSiblingDB(\"admin\").grantPrivilegesToRole(\"<a role of the relay's user>\", %s)\n"+
		"if the role does not exist: db.getSiblingDB(\"admin\").createRole({role: \"outrelay\", roles: [], privileges: [...]}), then grantRolesToUser", privileges)
}

func (a access) grantCluster(action string) string {
	return a.grant(clusterPrivilege("", "", action))
}

// explainRefusal returns the finding for a read that MongoDB rejected.
func (a access) explainRefusal(err error) finding {
	if privilegeErr, ok := errors.AsType[*mongodb.PrivilegeError](err); ok {
		on := Resource{Cluster: privilegeErr.On == "cluster"}
		if !on.Cluster {
			on.DB, on.Collection, _ = strings.Cut(privilegeErr.On, ".")
		}
		actions := strings.Split(strings.ReplaceAll(privilegeErr.Action, " and ", ", "), ", ")
		return unchecked(a.grant(Privilege{Resource: on, Actions: actions}),
			"the user lacks the action %s on %s", privilegeErr.Action, on)
	}

	if mongodb.HasCode(err, mongodb.CodeUnauthorized) {
		return unchecked("", "the user lacks a privilege; grant the missing privileges listed above")
	}
	return unchecked("", "MongoDB returns: %v", err)
}

// privilegeChecks check the privileges of the user in MongoDB.
type privilegeChecks struct{ *examination }

// checkAccess reads the user's privileges, including those of inherited roles, and checks whether
// access control is enabled.
func (x privilegeChecks) checkAccess(ctx context.Context) finding {
	if err := x.readAccess(ctx); err != nil {
		return failed("", "reading the privileges of the user failed: %v", err)
	}

	access := x.mongo.access
	switch {
	case access.off:
		return passed("access control is off: every user is allowed everything")
	case len(access.logins) == 0:
		return noLogin()
	}
	return passed("logged in, with %d privileges from %d roles", len(access.privileges), access.roles)
}

func noLogin() finding {
	return failed("set the user and the password of the relay in mongodb.uri", "the server has access control, but mongodb.uri names no user")
}

// readAccess reads the user's privileges, and whether access control is enabled.
func (x privilegeChecks) readAccess(ctx context.Context) error {
	var reply struct {
		Auth struct {
			Users []login `bson:"authenticatedUsers"`
			Roles []struct {
				Role string `bson:"role"`
				DB   string `bson:"db"`
			} `bson:"authenticatedUserRoles"`
			Privileges []storedPrivilege `bson:"authenticatedUserPrivileges"`
		} `bson:"authInfo"`
	}
	if err := x.mongo.runAdminCommand(ctx, bson.D{{Key: "connectionStatus", Value: 1}, {Key: "showPrivileges", Value: true}}, &reply); err != nil {
		return err
	}

	access := access{logins: reply.Auth.Users, roles: len(reply.Auth.Roles)}
	for _, p := range reply.Auth.Privileges {
		access.add(p)
	}

	for _, r := range reply.Auth.Roles {
		// Built-in roles cannot be changed, so a grant needs a role that is not one.
		if access.role == "" && r.DB == "admin" && !isBuiltIn(r.Role) {
			access.role = r.Role
		}
	}

	// Without access control the reply lists neither users nor privileges.
	access.off = x.accessControlOff(ctx, len(reply.Auth.Users) > 0)
	x.mongo.access = access
	return nil
}

// accessControlOff tries a command that only few users may run, and reads the options of the server.
func (x privilegeChecks) accessControlOff(ctx context.Context, loggedIn bool) bool {
	if !loggedIn {
		// Without a login, a read is refused only if access control is on.
		_, err := mongodb.Exists(ctx, state.Open(x.mongo.client, x.cfg.State).Collection("watchers"), bson.D{})
		return !mongodb.HasCode(err, mongodb.CodeUnauthorized)
	}

	var opts struct {
		Parsed struct {
			Security struct {
				Authorization string `bson:"authorization"`
				KeyFile       string `bson:"keyFile"`
				ClusterMode   string `bson:"clusterAuthMode"`
			} `bson:"security"`
		} `bson:"parsed"`
	}
	if err := x.mongo.runAdminCommand(ctx, bson.D{{Key: "getCmdLineOpts", Value: 1}}, &opts); err != nil {
		// The server rejects this command only with access control.
		return false
	}

	security := opts.Parsed.Security
	return security.Authorization != "enabled" && security.KeyFile == "" && security.ClusterMode == ""
}

// isBuiltIn reports whether a role of the database admin is built in. Such a role cannot be extended.
func isBuiltIn(role string) bool {
	return slices.Contains([]string{
		"read", "readWrite", "dbAdmin", "dbOwner", "userAdmin", "readAnyDatabase", "readWriteAnyDatabase", "userAdminAnyDatabase", "dbAdminAnyDatabase",
		"clusterAdmin", "clusterManager", "clusterMonitor", "hostManager", "backup", "restore", "root", "enableSharding", "directShardOperations", "__system", "__queryableBackup",
	}, role)
}

// checkPrivileges fails if a needed action is missing, and warns if a wanted action is missing.
func (x privilegeChecks) checkPrivileges(needed, wanted []Privilege) finding {
	if x.mongo.access.off {
		return passed("access control is off")
	}

	missing, said := x.mongo.access.lacking(needed)
	softly, saidSoftly := x.mongo.access.lacking(wanted)
	fix := ""
	if all := slices.Concat(missing, softly); len(all) > 0 {
		// A longer fix would hide the reason on a terminal.
		fix = x.mongo.access.grant(all[:min(len(all), 20)]...)
	}
	switch {
	case len(missing) > 0:
		return failed(fix, "missing: %s", joinFew(slices.Concat(said, saidSoftly), 8))
	case len(softly) > 0:
		return warned(fix, "missing: %s", joinFew(saidSoftly, 8))
	}

	return passed("%s", describePrivileges(needed, wanted))
}

func describePrivileges(needed, wanted []Privilege) string {
	list := slices.Concat(needed, wanted)
	if len(list) == 0 {
		return "no privileges are needed yet"
	}
	var said []string
	for _, d := range list {
		said = append(said, d.String())
	}
	return joinFew(said, 3)
}

// checkStreamPrivileges checks the change stream, which is opened on a collection, a database or the
// cluster.
func (x privilegeChecks) checkStreamPrivileges(context.Context) finding {
	db, coll := x.scope.Target()
	return x.checkPrivileges([]Privilege{privilegeOn(db, coll, "", "find", "changeStream")}, nil)
}

func (x privilegeChecks) checkOutboxPrivileges(context.Context) finding {
	var needed, wanted []Privilege
	databases := map[string]bool{}
	for _, ns := range x.watchedCollections() {
		db, coll, _ := strings.Cut(ns, ".")
		needed = append(needed, privilegeOn(db, coll, "", "find"))
		if writesOutboxes(x.cfg) {
			needed[len(needed)-1].Actions = readWrite
		}
		if x.cfg.Purge.TTL > 0 {
			wanted = append(wanted, privilegeOn(db, coll, "", indexActions[1:]...))
		}
		if !databases[db] {
			databases[db] = true
			wanted = append(wanted, privilegeOn(db, "", "", "listCollections"))
		}
	}

	return x.checkPrivileges(needed, wanted)
}

func (x privilegeChecks) checkDeadPrivileges(context.Context) finding {
	maker := roleMaker{cfg: x.cfg}
	maker.cfg.Watch = x.watchedCollections()
	return x.checkPrivileges(nil, maker.handlerLetterPrivileges())
}

func (x privilegeChecks) checkStatePrivileges(context.Context) finding {
	needed, alike := x.listStatePrivileges()
	if alike {
		return x.checkPrivileges(needed, nil)
	}
	// Without them, an administrator has to run outrelay setup for each version.
	wanted := roleMaker{cfg: x.cfg}.onState("", "createCollection", "createIndex", "listIndexes")
	return x.checkPrivileges(needed, wanted)
}

// listStatePrivileges returns the privileges that the relay needs on its collections. If the user lacks the same actions on all of
// them, alike is true, and the privileges are as `outrelay roles` grants them.
func (x privilegeChecks) listStatePrivileges() (needed []Privilege, alike bool) {
	name := x.cfg.State.Database
	collections := state.NamesWith(x.cfg.State.Prefix)
	first := x.mongo.access.missing(Resource{DB: name, Collection: collections[0]}, readWrite...)
	alike = len(first) > 0
	for _, coll := range collections {
		privilege := privilegeOn(name, coll, "", readWrite...)
		needed = append(needed, privilege)
		alike = alike && slices.Equal(first, x.mongo.access.missing(privilege.Resource, readWrite...))
	}

	if alike {
		return roleMaker{cfg: x.cfg}.onState("", readWrite...), true
	}
	return needed, false
}

// requireDelivery returns an *[Unusable] with the user, the missing rights without which no event is delivered, and the commands that
// grant them. It returns nil if nothing is missing, or if the rights cannot be read now.
func (x privilegeChecks) requireDelivery(ctx context.Context) error {
	if x.readAccess(ctx) != nil || x.mongo.access.off {
		return nil
	}
	access := x.mongo.access
	if len(access.logins) == 0 {
		finding := noLogin()
		return &Unusable{"MongoDB", finding.detail, finding.fix, true}
	}

	// The purge and records of deliveries need more. Without these rights, events are delivered, and the relay reports the problem.
	db, coll := x.scope.Target()
	needed := []Privilege{privilegeOn(db, coll, "", "find", "changeStream")}
	for _, ns := range x.cfg.Watch {
		if db, coll, _ := strings.Cut(ns, "."); !glob.HasWildcard(ns) {
			needed = addPrivileges(needed, privilegeOn(db, coll, "", "find"))
		}
	}
	ofState, _ := x.listStatePrivileges()
	missing, named := access.lacking(slices.Concat(needed, ofState))
	// A server that does not list privileges decides when the relay uses them.
	if len(missing) == 0 || len(access.privileges) == 0 {
		return nil
	}
	user := access.logins[0]
	const most = 3
	// For many rights, the whole role is shorter than a grant for each.
	fix := fmt.Sprintf("as an administrator, run: outrelay roles --only mongodb | mongosh \"$ADMIN_URI\", and in mongosh: "+
		"db.getSiblingDB(%q).grantRolesToUser(%q, [{role: \"outrelayRelay\", db: \"admin\"}])", user.DB, user.User)
	if access.role != "" && len(missing) <= most {
		fix = "as an administrator, run in mongosh: " + access.grant(missing...) + " (outrelay roles --only mongodb prints the whole role)"
	}
	return &Unusable{"MongoDB", fmt.Sprintf("user %s lacks %s", user, joinFew(named, most)), fix, true}
}

// checkState checks that the state database is the relay's own, and complete.
func (x privilegeChecks) checkState(ctx context.Context) finding {
	db := state.Open(x.mongo.client, x.cfg.State)
	if err := db.Check(ctx); err != nil {
		return failed("set state.prefix or state.database to another value", "%v", err)
	}

	missing, err := db.Missing(ctx)
	switch {
	case err != nil:
		return x.mongo.access.explainRefusal(err)
	case len(missing) == 0:
		return passed("%s has all collections with the prefix %s", db.Name(), db.Prefix())
	case !x.mongo.access.off && len(x.mongo.access.missing(Resource{DB: db.Name(), Collection: db.Names()[1]}, "createCollection", "createIndex")) > 0:
		return warned("run outrelay setup with an administrator's user, or these statements:\n"+joinLines(missing, 40),
			"%d collections and indexes are missing, and the user may not create them", len(missing))
	}
	return passed("the first start creates the collections with the prefix %s in %s", db.Prefix(), db.Name())
}

func (x privilegeChecks) checkClusterPrivileges(context.Context) finding {
	if x.mongo.hello.mongos() {
		return x.checkPrivileges(nil, nil)
	}
	return x.checkPrivileges(nil, []Privilege{clusterPrivilege("", "", "serverStatus", "replSetGetConfig")})
}

// watchedCollections returns the existing collections, and all collections that are configured without
// a pattern.
func (x privilegeChecks) watchedCollections() []string {
	var out []string
	for _, o := range x.mongo.outboxes.list {
		out = append(out, o.NS())
	}

	for _, ns := range x.cfg.Watch {
		if !strings.ContainsAny(ns, "*?") && !slices.Contains(out, ns) {
			out = append(out, ns)
		}
	}

	slices.Sort(out)
	return out
}
