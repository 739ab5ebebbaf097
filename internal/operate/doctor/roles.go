package doctor

import (
	"fmt"
	"strings"

	"github.com/outrelay/outrelay/internal/contract/config"
	"github.com/outrelay/outrelay/internal/mongodb/rights"
	"github.com/outrelay/outrelay/internal/relay/changes"
	"github.com/outrelay/outrelay/internal/service/inbox"
)

// Privilege is a MongoDB privilege: of a role, or granted to the user, needed or missing.
type Privilege struct {
	Resource Resource `json:"resource"`
	Actions  []string `json:"actions"`
	Why      string   `json:"why,omitempty"`
	// Optional describes what does not work without the privilege. "" means that it is required.
	Optional string `json:"optional,omitempty"`
}

func (p Privilege) String() string {
	return rights.Grant{Resource: p.Resource, Actions: p.Actions}.String()
}

// statement returns the privilege in the syntax of mongosh.
func (p Privilege) statement() string {
	return rights.Grant{Resource: p.Resource, Actions: p.Actions}.Statement()
}

// Role is a role of the MongoDB database admin.
type Role struct {
	Name       string      `json:"role"`
	For        string      `json:"for"`
	Privileges []Privilege `json:"privileges"`
}

// ACL allows one user of Kafka operations on one resource.
type ACL struct {
	For        string   `json:"for"`       // relay, consumer or service
	Principal  string   `json:"principal"` // User:name
	Resource   string   `json:"resource"`  // topic, transactional-id or group
	Name       string   `json:"name"`
	Pattern    string   `json:"pattern"` // literal or prefixed
	Operations []string `json:"operations"`
	Why        string   `json:"why"`
}

// Roles are the minimal privileges of each user of a deployment.
type Roles struct {
	MongoDB []Role `json:"mongodb"`
	Kafka   []ACL  `json:"kafka"`
}

// RolesFor selects the users that get roles in addition to the relay.
type RolesFor struct {
	Prefix    string   // of the roles' names; defaults to outrelay
	Databases []string // of the services that consume; empty takes those of consumers.databases, and of watch without a pattern
	Inbox     string   // the collection of the inbox; defaults to inbox
	Sagas     []string // the collections of sagas
	Group     string   // Kafka's consumer group; empty leaves consumers out of the ACLs
	Principal string   // the relay's, User:name; empty takes the SASL user of the configuration
	Consumer  string   // the consumers' principal; defaults to User:<service>
}

// NewRoles derives the roles from the configuration, without a connection to any server. They satisfy
// the checks of privileges and ACLs. The tests run the relay with them.
func NewRoles(cfg config.Config, who RolesFor) (Roles, error) {
	scope, err := changes.ParseScope(cfg.Watch, cfg.State.Pattern())
	if err != nil {
		return Roles{}, fmt.Errorf("watch: %w", err)
	}

	if who.Prefix == "" {
		who.Prefix = "outrelay"
	}
	if who.Inbox == "" {
		who.Inbox = inbox.DefaultCollection
	}
	maker := &roleMaker{cfg: cfg, scope: scope, who: who}
	roles := NewKafkaRoles(cfg, who)
	roles.MongoDB = []Role{maker.relayRole(), maker.setupRole(), maker.serviceRole(), maker.schedulerRole(), maker.consumerRole(), maker.operatorRole(), maker.readerRole()}
	return roles, nil
}

// NewKafkaRoles derives the ACLs only, which do not depend on watch.
func NewKafkaRoles(cfg config.Config, who RolesFor) Roles {
	return Roles{Kafka: (&roleMaker{cfg: cfg, who: who}).listACLs()}
}

// Script returns a script for mongosh that creates the roles, or updates them if they exist.
func (r Roles) Script() string {
	var builder strings.Builder
	builder.WriteString("// For mongosh, as a user who may manage roles: mongosh \"$URI\" roles.js\n" +
		"const admin = db.getSiblingDB(\"admin\");\n" +
		"const make = (role, privileges) => admin.getRole(role) ? admin.updateRole(role, {privileges, roles: []}) : admin.createRole({role, privileges, roles: []});\n")
	for _, role := range r.MongoDB {
		fmt.Fprintf(&builder, "\n// %s\nmake(%q, [\n", role.For, role.Name)
		for _, p := range role.Privileges {
			why := p.Why
			if p.Optional != "" {
				why += " (optional: " + p.Optional + ")"
			}
			fmt.Fprintf(&builder, "  // %s\n  %s,\n", why, p.statement())
		}

		builder.WriteString("]);\n")
	}

	builder.WriteString("\n// Then a user for each, such as:\n// admin.createUser({user: \"relay\", pwd: passwordPrompt(), roles: [\"" + r.MongoDB[0].Name + "\"]})\n")
	return builder.String()
}

// Commands returns the commands of kafka-acls.sh.
func (r Roles) Commands(brokers []string) string {
	var builder strings.Builder
	for _, a := range r.Kafka {
		fmt.Fprintf(&builder, "# the %s: %s\nkafka-acls.sh --bootstrap-server %s --command-config admin.properties --add --allow-principal '%s' --operation %s --%s '%s'", a.For, a.Why,
			strings.Join(brokers, ","), a.Principal, strings.Join(a.Operations, " --operation "), a.Resource, a.Name)
		if a.Pattern == "prefixed" {
			builder.WriteString(" --resource-pattern-type prefixed")
		}
		builder.WriteString("\n")
	}
	return builder.String()
}
