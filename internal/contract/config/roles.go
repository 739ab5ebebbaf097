package config

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
)

// The roles of a process.
const (
	RoleRelay   = "relay"
	RoleCleaner = "cleaner"
	RoleAdmin   = "admin"
)

var allRoles = []string{RoleRelay, RoleCleaner, RoleAdmin}

// HasRole reports whether the process has the role.
func (c *Config) HasRole(role string) bool { return slices.Contains(c.Roles, role) }

func (c *Config) validateRoles(validator validator) {
	allKnown := true
	for i, r := range c.Roles {
		known := slices.Contains(allRoles, r)
		allKnown = allKnown && known
		validator.check(fmt.Sprintf("roles[%d]", i), known, strconv.Quote(r), "expected one of "+strings.Join(allRoles, ", "))
	}

	// If a role is unknown, that problem is enough.
	serves := c.HasRole(RoleAdmin) && c.HTTP.Admin != nil
	hasWork := len(c.Roles) > 0 && (c.HasRole(RoleRelay) || serves)
	validator.check("roles", !allKnown || hasWork, "["+strings.Join(c.Roles, ", ")+"]",
		"expected relay, or admin together with http.admin; otherwise this process has nothing to do")
}
