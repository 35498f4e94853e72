// Package rules takes a snapshot of a virtual host, works out where its messages go, and has the one
// table of rules that guards of package retry, check.Verify, and the doctor share. Packages
// declare/check and operate/audit export its types and functions by other names.
package rules
