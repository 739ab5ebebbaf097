package doctor

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"unicode"
)

// atlasRole is a custom role in the format of the Atlas Administration API.
type atlasRole struct {
	RoleName string        `json:"roleName"`
	Actions  []atlasAction `json:"actions"`
}

type atlasAction struct {
	Action    string     `json:"action"`
	Resources []Resource `json:"resources"`
}

// AtlasRoles returns one document for each role, for createCustomDatabaseRole of the Atlas Administration API: Atlas does not
// execute createRole.
func (r Roles) AtlasRoles() string {
	var builder strings.Builder
	for _, role := range r.MongoDB {
		out := atlasRole{RoleName: role.Name, Actions: []atlasAction{}}

		for _, p := range role.Privileges {
			// Atlas lists the resources of each action.
			for _, action := range p.Actions {
				name := atlasActionName(action)
				at := slices.IndexFunc(out.Actions, func(atlasAction atlasAction) bool { return atlasAction.Action == name })
				if at < 0 {
					at = len(out.Actions)
					out.Actions = append(out.Actions, atlasAction{Action: name})
				}
				out.Actions[at].Resources = append(out.Actions[at].Resources, p.Resource)
			}
		}

		text, _ := json.Marshal(out) // strings
		builder.Write(text)
		builder.WriteByte('\n')
	}
	return builder.String()
}

// atlasActionName returns the name of an action in Atlas: createIndex is CREATE_INDEX there.
func atlasActionName(action string) string {
	var builder strings.Builder
	for _, r := range action {
		if unicode.IsUpper(r) {
			builder.WriteByte('_')
		}
		builder.WriteRune(unicode.ToUpper(r))
	}
	return builder.String()
}

// ConfluentCommands returns the commands of the confluent CLI. A principal is the id of a service account there. Like Commands, it fails
// if the name of a user is not known.
func (r Roles) ConfluentCommands() (string, error) {
	options := map[string]string{"topic": "--topic", "transactional-id": "--transactional-id", "group": "--consumer-group"}
	var builder strings.Builder
	for _, a := range r.Kafka {
		if a.Principal == "" {
			return "", fmt.Errorf("roles: %s", missingPrincipals[a.For])
		}
		operations := strings.ToLower(strings.ReplaceAll(strings.Join(a.Operations, ","), "_", "-"))
		fmt.Fprintf(&builder, "# the %s: %s\nconfluent kafka acl create --allow --service-account '%s' --operations %s %s '%s'",
			a.For, a.Why, strings.TrimPrefix(a.Principal, "User:"), operations, options[a.Resource], a.Name)
		if a.Pattern == "prefixed" {
			builder.WriteString(" --prefix")
		}
		builder.WriteByte('\n')
	}
	return builder.String(), nil
}

// iamPolicy is a policy of AWS IAM.
type iamPolicy struct {
	Version   string
	Statement []iamStatement
}

type iamStatement struct {
	Sid      string
	Effect   string
	Action   []string
	Resource []string
}

// iamActions are the actions of Amazon MSK for each operation on a kind of resource.
var iamActions = map[string]map[string][]string{
	"topic": {
		"READ":             {"ReadData"},
		"WRITE":            {"WriteData"},
		"DESCRIBE":         {"DescribeTopic"},
		"DESCRIBE_CONFIGS": {"DescribeTopicDynamicConfiguration"},
		"CREATE":           {"CreateTopic"},
	},
	"transactional-id": {"WRITE": {"AlterTransactionalId"}, "DESCRIBE": {"DescribeTransactionalId"}},
	"group":            {"READ": {"AlterGroup"}, "DESCRIBE": {"DescribeGroup"}},
}

// MSKPolicies returns the policies of the relay and, with a group, of consumers, as lines of "name" and a JSON document. The name
// of the cluster is a variable in them, because the configuration has only its addresses.
func (r Roles) MSKPolicies() string {
	// The policies appear in the order of their users' first ACL.
	const prefix = "arn:aws:kafka:REGION:ACCOUNT:"
	var users []string
	policies := map[string]*iamPolicy{}
	for _, a := range r.Kafka {
		policy := policies[a.For]
		if policy == nil {
			users = append(users, a.For)
			policy = &iamPolicy{Version: "2012-10-17", Statement: []iamStatement{{
				Sid: "Cluster", Effect: "Allow", Action: []string{"kafka-cluster:Connect", "kafka-cluster:DescribeCluster"},
				Resource: []string{prefix + "cluster/CLUSTER/*"},
			}}}
			// A producer without a transaction is idempotent by permission on the cluster.
			if a.For == forRelay {
				policy.Statement[0].Action = append(policy.Statement[0].Action, "kafka-cluster:WriteDataIdempotently")
			}
			policies[a.For] = policy
		}

		name := a.Name
		if a.Pattern == "prefixed" {
			name += "*"
		}
		statement := iamStatement{Effect: "Allow", Resource: []string{prefix + a.Resource + "/CLUSTER/*/" + name}}
		statement.Sid = fmt.Sprintf("Statement%d", len(policy.Statement))
		// IAM has its own names, and an operation of Kafka may need several of them.
		for _, op := range a.Operations {
			for _, action := range iamActions[a.Resource][op] {
				statement.Action = append(statement.Action, "kafka-cluster:"+action)
			}
		}
		policy.Statement = append(policy.Statement, statement)
	}

	var builder strings.Builder
	for _, user := range users {
		text, _ := json.MarshalIndent(policies[user], "", "  ") // strings
		fmt.Fprintf(&builder, "# the %s; replace REGION, ACCOUNT and CLUSTER\n%s\n", user, text)
	}
	return builder.String()
}
