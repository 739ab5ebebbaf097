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

// Is reports whether the process has a role.
func (c *Config) Is(role string) bool { return slices.Contains(c.Roles, role) }

func (c *Config) validateRoles(v validator) {
	for i, r := range c.Roles {
		v.check(fmt.Sprintf("roles[%d]", i), slices.Contains(allRoles, r), strconv.Quote(r), "expected one of "+strings.Join(allRoles, ", "))
	}
	serves := c.Is(RoleAdmin) && c.HTTP.Admin != nil
	bad := slices.ContainsFunc(c.Roles, func(r string) bool { return !slices.Contains(allRoles, r) })
	v.check("roles", bad || len(c.Roles) > 0 && (c.Is(RoleRelay) || serves), "["+strings.Join(c.Roles, ", ")+"]", "expected relay, or admin together with http.admin: this process would do nothing")
}
