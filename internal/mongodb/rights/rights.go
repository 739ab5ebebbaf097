// Package rights reads the privileges of the user of a connection to MongoDB.
//
// Blocking: [Read] blocks until the server responds to two commands. Cost: none but these commands.
package rights

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/internal/mongodb"
)

// Resource is the resource of a privilege: collections, or the cluster. An empty name of a database means all databases, and
// an empty name of a collection all collections except system collections.
type Resource struct {
	DB, Collection string
	Cluster        bool

	Any bool // everything, which only some built-in roles have
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

// Covers reports whether a privilege on r includes want. An empty name in want means all names.
func (r Resource) Covers(want Resource) bool {
	switch {
	case r.Any:
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

// Statement returns the resource in the syntax of mongosh.
func (r Resource) Statement() string {
	if r.Cluster {
		return "{cluster: true}"
	}
	return fmt.Sprintf("{db: %q, collection: %q}", r.DB, r.Collection)
}

// Grant is a list of actions on a resource: granted, needed or missing.
type Grant struct {
	Resource Resource
	Actions  []string
}

func (g Grant) String() string { return strings.Join(g.Actions, ", ") + " on " + g.Resource.String() }

// Statement returns the grant in the syntax of mongosh.
func (g Grant) Statement() string {
	actions, _ := json.Marshal(g.Actions) // strings
	return fmt.Sprintf("{resource: %s, actions: %s}", g.Resource.Statement(), actions)
}

// Login is a user of a database.
type Login struct {
	User string `bson:"user"`
	DB   string `bson:"db"`
}

func (l Login) String() string { return l.User + "@" + l.DB }

// Access contains the privileges of a user.
type Access struct {
	Off    bool // access control is disabled
	Logins []Login
	Grants []Grant
	Roles  int
	Role   string // a role of the user that can be extended, or ""
}

// Stored is a privilege in a response of MongoDB.
type Stored struct {
	Resource struct {
		DB      *string `bson:"db"`
		Coll    *string `bson:"collection"`
		Cluster bool    `bson:"cluster"`
		Any     bool    `bson:"anyResource"`
	} `bson:"resource"`
	Actions []string `bson:"actions"`
}

// Add adds a privilege. It leaves out those on other kinds of resources, such as system_buckets, which the relay does not need.
func (a *Access) Add(privilege Stored) {
	resource := Resource{Cluster: privilege.Resource.Cluster, Any: privilege.Resource.Any}
	if privilege.Resource.DB != nil && privilege.Resource.Coll != nil {
		resource.DB, resource.Collection = *privilege.Resource.DB, *privilege.Resource.Coll
	} else if !resource.Cluster && !resource.Any {
		return
	}
	a.Grants = append(a.Grants, Grant{resource, privilege.Actions})
}

// Missing returns the actions that no privilege allows on resource.
func (a *Access) Missing(resource Resource, actions ...string) []string {
	var out []string
	for _, action := range actions {
		if !a.Off && !slices.ContainsFunc(a.Grants, func(grant Grant) bool {
			return grant.Resource.Covers(resource) && slices.Contains(grant.Actions, action)
		}) {
			out = append(out, action)
		}
	}
	return out
}

// Lacking returns the parts of needed that the user lacks.
func (a *Access) Lacking(needed []Grant) (missing []Grant) {
	for _, grant := range needed {
		if denied := a.Missing(grant.Resource, grant.Actions...); len(denied) > 0 {
			missing = append(missing, Grant{grant.Resource, denied})
		}
	}
	return missing
}

// FormatGrant returns the statement that grants the missing privileges to the role of the user.
func (a *Access) FormatGrant(missing ...Grant) string {
	list := make([]string, len(missing))
	for i, grant := range missing {
		list[i] = grant.Statement()
	}

	privileges := "[" + strings.Join(list, ", ") + "]"
	if a.Role != "" {
		return fmt.Sprintf("db.getSiblingDB(\"admin\").grantPrivilegesToRole(%q, %s)", a.Role, privileges)
	}
	return fmt.Sprintf("db.getSiblingDB(\"admin\").grantPrivilegesToRole(\"<a role of the relay's user>\", %s)\n"+
		"if the role does not exist: db.getSiblingDB(\"admin\").createRole({role: \"outrelay\", roles: [], privileges: [...]}), then grantRolesToUser", privileges)
}

// Read reads the privileges of the user of the client of probe, including the privileges of inherited roles, and whether access control is enabled.
// Only a user may read probe.
func Read(ctx context.Context, probe *mongo.Collection) (Access, error) {
	var response struct {
		Auth struct {
			Users []Login `bson:"authenticatedUsers"`
			Roles []struct {
				Role string `bson:"role"`
				DB   string `bson:"db"`
			} `bson:"authenticatedUserRoles"`
			Privileges []Stored `bson:"authenticatedUserPrivileges"`
		} `bson:"authInfo"`
	}
	admin := probe.Database().Client().Database("admin")
	command := bson.D{{Key: "connectionStatus", Value: 1}, {Key: "showPrivileges", Value: true}}
	if err := admin.RunCommand(ctx, command).Decode(&response); err != nil {
		return Access{}, err
	}

	access := Access{Logins: response.Auth.Users, Roles: len(response.Auth.Roles)}
	for _, p := range response.Auth.Privileges {
		access.Add(p)
	}
	for _, r := range response.Auth.Roles {
		// Built-in roles cannot be changed, so a grant needs a role that is not one.
		if access.Role == "" && r.DB == "admin" && !isBuiltIn(r.Role) {
			access.Role = r.Role
		}
	}

	// Without access control the response lists neither users nor privileges.
	access.Off = isOff(ctx, probe, len(response.Auth.Users) > 0)
	return access, nil
}

// isOff tries a command that only few users may run, and reads the options of the server.
func isOff(ctx context.Context, probe *mongo.Collection, loggedIn bool) bool {
	if !loggedIn {
		// Without a login, a read is rejected only if access control is on.
		_, err := mongodb.Exists(ctx, probe, bson.D{})
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
	command := bson.D{{Key: "getCmdLineOpts", Value: 1}}
	if err := probe.Database().Client().Database("admin").RunCommand(ctx, command).Decode(&opts); err != nil {
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
