package audit

// CheckUnused is what DeleteUnused checks before it deletes.
var CheckUnused = checkUnused
